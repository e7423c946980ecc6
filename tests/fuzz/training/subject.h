#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "fuzz/training/model/net.h"
#include "tessera/join.h"
#include "tessera/local_sgd.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/step/no_sync.h"

namespace tessera::fuzz {

/// A model with a wrapper and an optimizer, on one rank. The members are collective where the
/// wrapper's are.
class Subject {
 public:
  virtual ~Subject() = default;

  Net& net() { return *net_; }
  virtual at::Tensor forward(const Batch& batch) { return net_->forward(batch); }
  virtual void backward(const at::Tensor& loss, bool retain) { loss.backward({}, retain); }
  virtual NoSync no_sync() = 0;
  virtual double clip_norm(double max_norm, double norm_type);
  virtual void clip_value();
  /// Multiplies the gradients that the optimizer will use, as the user's code would.
  void scale_gradients(double factor);
  /// Gives them the same in tensors of their own.
  void replace_gradients(double factor);
  std::vector<at::Tensor> gradients();
  /// The tensors whose gradients the optimizer will use.
  virtual std::vector<at::Tensor> trained();
  /// Of the last step(), where the wrapper knows it.
  virtual double norm_of_step() { return 0; }
  using Closure = torch::optim::Optimizer::LossClosure;
  virtual void step(const Closure& closure) { optimizer().step(closure); }
  virtual void zero_grad(bool set_to_none);
  /// Holds the options (lr).
  virtual torch::optim::Optimizer& optimizer() = 0;
  virtual std::vector<std::reference_wrapper<Joinable>> joinables() = 0;
  /// A loop that may end earlier than the others'; `iteration` is one step.
  virtual void prepare_join(const std::function<void()>& /*shadow*/) {}

  /// On all ranks.
  virtual ModuleStateDict weights() { return state_dict(*net_); }
  virtual OptimizerStateDict optimizer_state();
  virtual void load(const ModuleStateDict& weights, const OptimizerStateDict& state);
  /// Writes a checkpoint of weights and optimizer state to `folder`, by shards. Collective.
  void save(const std::string& folder, const ProcessGroup& group, LocalSgd* local_sgd = nullptr);
  /// Reads what save() has written, in any wrapper and world. Options are not part of it.
  void load(const std::string& folder);
  /// Runs `change` while the parameters are whole.
  virtual void change(const std::function<void()>& change) { change(); }
  virtual void add_late_part() {}
  /// Synchronises the model with those of the other groups; `groups.inner` is that of the wrapper.
  std::unique_ptr<LocalSgd> make_local_sgd(const LocalSgdGroups& groups,
                                           const LocalSgdOptions& options);
  /// Returns when parameters on their way have arrived.
  virtual void settle() {}

 protected:
  explicit Subject(std::shared_ptr<Net> net) : net_(std::move(net)) {}
  virtual void load_weights(const ModuleStateDict& weights) { load_state_dict(*net_, weights); }
  virtual std::vector<ParameterShard> shards() { return parameter_shards(named_parameters(*net_)); }
  /// The same with frozen parameters, which may have state.
  virtual std::vector<ParameterShard> state_shards();
  virtual std::vector<StateSlice> state_slices() {
    return tessera::state_slices(optimizer(), state_shards());
  }
  virtual void load_state_slices(const std::vector<StateSlice>& slices) {
    tessera::load_state_slices(optimizer(), state_shards(), slices);
  }
  /// Gives what was written to the shards to the other ranks.
  virtual void publish() {}
  /// Before the shards are read and written by LocalSgd. Collective.
  virtual void prepare() {}
  /// This rank's shards are not written by another rank.
  virtual bool saves_shards(int rank) { return rank == 0; }
  /// Every rank has all shards. The same on all ranks.
  virtual bool is_replicated() { return true; }

  std::shared_ptr<Net> net_;
};

/// Reads what Subject::save() has written of a LocalSgd, with the entries and numbers of `like`.
void load_local_sgd(LocalSgd& local_sgd, const LocalSgd::State& like, const std::string& folder);

/// The wrapper that `wrapper` describes. Collective.
std::unique_ptr<Subject> make_subject(const Case& which, const Item& wrapper,
                                      std::shared_ptr<Net> net, const ProcessGroup& group);

}  // namespace tessera::fuzz
