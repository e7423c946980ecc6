#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "fuzz/training/model/net.h"
#include "fuzz/training/record.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/step/buffer_sync.h"

namespace tessera::fuzz {

/// The optimizer of a case, for any parameters.
OptimizerFactory optimizer_of(const Case& which);

/// The sum in the order of the library: (x0 + x1) + (x2 + x3), …. Undefined tensors are zeros.
at::Tensor tree_sum(const std::vector<at::Tensor>& tensors);

/// Of the second parameter group, where the wrapper has two.
double lr_of_second_group(const Case& which, const Item& wrapper);

/// Multiplies the lr of all groups.
void scale_lr(torch::optim::Optimizer& optimizer, double factor);

/// Data-parallel training with libtorch alone: one replica of the model for each rank, in one
/// thread. Gradients are averaged in the order of the library where `wrapper` averages them.
class PlainTraining {
 public:
  /// The ranks from `first` on, `world` of them; 0: all.
  explicit PlainTraining(const Case& which, int first = 0, int world = 0);

  /// Plays one event on all replicas. Returns the losses and so on by rank. Throws what libtorch
  /// throws.
  std::vector<Record> play(const Item& event, int number);
  /// Adds what the replicas have after the event.
  void add_results(const Item& event, std::vector<Record>& records) const;

  /// Goes on from what `rank` has elsewhere. `state`: of the optimizer, if it is another one.
  void adopt(int rank, const ModuleStateDict& weights,
             const std::optional<OptimizerStateDict>& state);

  const Net& net() const { return *replicas_[0].net; }
  int world() const { return static_cast<int>(replicas_.size()); }
  const NamedParameters& parameters(int rank) const { return replicas_[rank].parameters; }

 private:
  struct Replica {
    std::shared_ptr<Net> net;
    NamedParameters parameters;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    std::vector<std::shared_ptr<Net>> copies = {};  ///< That computed in this event.
  };
  /// When gradients are averaged, and where the mean is added.
  enum class Reduce { after_backward, into_shards, in_step };

  void start(const Item& wrapper, int world, std::vector<std::shared_ptr<Net>> nets);
  bool is(const char* kind) const { return wrapper_.kind == kind; }

  void train(const Item& event, int number, std::vector<Record>& records);
  void minimize(const Item& event, int number, std::vector<Record>& records);
  Net& computing(int rank);
  void backward(int rank, const at::Tensor& loss, bool retain = false);
  at::Tensor replica_loss(const Item& event, int number, int micro, int rank, int micros);
  void spring(const Item& event, int number);
  void join(const Item& event, int number);
  void evaluate(const Item& event, int number, std::vector<Record>& records);
  void set_trainable(int part, bool on);
  void add_group();
  void move(const Item& event);

  std::vector<int> all_ranks() const;
  void sync_buffers(const std::vector<int>& active);
  void before_forward(const std::vector<int>& active);
  void after_backward(const std::vector<int>& active, double divisor);
  /// The scaled sum of `.grad` of the ranks by parameter; undefined where no rank has one.
  std::vector<at::Tensor> average(const std::vector<int>& active, double scale) const;
  /// The dtype in which gradients of dtype `own` are summed.
  at::ScalarType sent_dtype(at::ScalarType own) const;
  double scale_of(double divisor) const;
  void set_gradients(const std::vector<at::Tensor>& gradients);
  /// Averages what has not been averaged yet; `.grad` of all replicas is what the optimizer uses.
  void finish_gradients(const std::vector<int>& active, double divisor);
  bool finite_gradients() const;
  void add_norms(const Item& event, std::vector<Record>& records) const;
  double clip(const Item& event);
  void scale_gradients(double factor);
  /// What the event's zero_grad does.
  void clear(const Item& event);
  void zero_grad();

  const Case& which_;
  int first_ = 0;  ///< Number of the first rank in the case.
  Item wrapper_;
  std::set<std::string> local_;  ///< Parameters that each rank has for itself.
  Reduce reduce_ = Reduce::after_backward;
  std::vector<Replica> replicas_;
  std::vector<at::Tensor> shard_gradients_;  ///< into_shards: what was reduced since zero_grad.
  bool late_part_added_ = false;
  bool cleared_ = true;  ///< No gradient is left from an earlier step.
};

}  // namespace tessera::fuzz
