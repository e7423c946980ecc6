#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/serialize.h>

#include "sharding/gradients/gradient_wire.h"
#include "sharding/module_buffers.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/zero_redundancy_optimizer.h"
#include "zero/local_optimizer.h"
#include "zero/norm_tracker.h"
#include "zero/plan.h"
#include "zero/shards/shards.h"
#include "zero/step_gradient.h"

namespace tessera {

/// A step and everything around it, in terms of its parts: `shards` (who owns what), `mean` (the
/// averaged gradient), `local` (the wrapped optimizer).
/// impl.cpp: construction, changes of parameters, state dicts by name. plan.cpp: the rules between
/// options. impl_state.cpp: archives and state of one rank. step.cpp: a step, norms, clipping.
class ZeroRedundancyOptimizer::Impl {
 public:
  static constexpr const char* kName = zero::kName;

  Impl(ZeroRedundancyOptimizer& outer, ProcessGroup group, OptimizerFactory factory,
       Options options, const std::vector<Group>& groups);

  static std::unique_ptr<torch::optim::OptimizerOptions> default_options(
      const OptimizerFactory& factory);
  void track_buffers(const torch::nn::Module& module);
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);
  OptimizerStateDict local_state() const;
  void add_group(Group group);
  /// `module`: of the parameters, if it is known.
  void finish_construction(const torch::nn::Module* module);

  at::Tensor step(const LossClosure& closure);
  void zero_grad(bool set_to_none);
  void shadow_backward();
  /// 0-dim, on the parameters' device.
  GradNorm clip(double max_norm, double norm_type);
  void clip_value(double clip_value);

  std::vector<OptimizerStateDict::Group> groups() const;
  OptimizerStateDict gather_state(int to);
  void load(const OptimizerStateDict& dict);
  void load_slices(std::vector<StateSlice>& slices);
  std::vector<ParameterShard> parameter_shards() const;
  Memory memory() const;
  void write_shared(const std::function<void()>& write);

  /// Gives parameters that were frozen until now their owners. Collective if requires_grad of a
  /// parameter has changed.
  void follow_trainability();
  void check_storage();
  std::string prefix() const;  ///< "ZeroRedundancyOptimizer: rank 2"

  ProcessGroup group;
  const zero::Plan plan;
  const Options& options;  ///< Those of the plan.
  sharding::GradientWire gradients;
  zero::Shards shards;
  std::unique_ptr<zero::MeanGradient> mean;
  zero::StepGradient* own_gradients = nullptr;  ///< `mean`, without shard_gradients.
  zero::LocalOptimizer local;
  zero::NormTracker norm;
  std::optional<OptimizerStateDict> consolidated;
  /// State, from a state dict or slices, of parameters that have been frozen since construction,
  /// with kWireResidual. The same on all ranks.
  std::map<std::string, ParamState> frozen_state;
  sharding::ModuleBuffers buffers;
  bool no_module = true;  ///< track_buffers() was not called.
  bool has_data = true;   ///< False while this rank takes part in a join without data.

 private:
  void make_local_optimizer();
  std::vector<std::string> option_lines() const;
  struct Plain {
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    NamedParameters parameters;
  };
  Plain plain_optimizer() const;
  void check_groups();
  std::string option_text() const;
  at::Tensor call(const LossClosure& closure);
  void register_parameters(const std::vector<sharding::NamedTensor>& added);
  void keep_shared_storage(const torch::nn::Module* module);
  void update(bool averaged);

  void prepare_step();
  void reduce_and_update(size_t bucket, FusedOptimizer& optimizer);
  void set_gradients(size_t bucket, bool averaged);
  void synchronize_buffers();
  at::Tensor step_with_closure(const LossClosure& closure);
  at::Tensor evaluate(const LossClosure& closure);
  void average();
  void clear_shard_gradients();

  ZeroRedundancyOptimizer& outer_;
  OptimizerFactory factory_;
  bool beside_ddp_;  // reduce_gradients was switched off
  std::vector<sharding::WrappedParameters> wrapped_;
  bool stepped_ = false;
};

}  // namespace tessera
