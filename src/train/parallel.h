#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/config.h"
#include "tessera/join.h"
#include "tessera/process_group.h"

namespace tessera::train {

/// What one rank holds, in bytes. State that an optimizer makes lazily counts once it exists.
struct MemoryUse {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;

  int64_t total() const { return parameters + gradients + optimizer_state; }
};

/// What the ranks agree on after a step.
struct StepFigures {
  double loss = 0;       ///< mean over ranks of the loss given to backward
  double grad_norm = 0;  ///< 2-norm of the global mean gradient, before clipping
};

/// What is trained: a module and how its loss is computed. Looks to DistributedDataParallel like a pointer to a module
/// whose forward is the loss.
struct Trainee {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const Batch&)> loss;

  torch::nn::Module& operator*() const { return *module; }
  const Trainee* operator->() const { return this; }
  at::Tensor forward(const Batch& batch) const { return loss(batch); }
};

/// One way of training a model on a group of ranks: everything the loop needs that depends on `parallel.type`. One file
/// each implements it. All ranks call all of it in the same order; it blocks.
class Parallel {
 public:
  virtual ~Parallel() = default;

  /// Mean loss over this rank's part of the batch, to differentiate in `backward`.
  virtual at::Tensor forward(const Batch& batch) = 0;
  virtual void backward(const at::Tensor& loss) = 0;
  /// The global mean gradient, clipped to `max_norm` if given, updates the parameters; the gradients are then gone. On
  /// return every rank's model has the new parameters.
  virtual StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) = 0;

  /// The loss of a batch, without gradients. All ranks call it equally often.
  virtual at::Tensor evaluate(const Batch& batch) = 0;
  /// While it lives, rank 0's module has whole parameters. Collective, both ends; null where they always are whole.
  virtual std::unique_ptr<FullParams> whole_on_rank0() { return nullptr; }

  /// What takes part in a join; null when this way of training cannot.
  virtual Joinable* joinable() { return nullptr; }
  /// In place of forward and backward, on a rank without data; then step() with an undefined loss.
  virtual void shadow_backward() {}
  /// How many ranks give step() a loss. Local.
  void set_active_ranks(int ranks) { active_ranks_ = ranks; }

  /// The configured one, before any set_lr.
  virtual double lr() const = 0;
  virtual void set_lr(double lr) = 0;
  /// After the first step.
  virtual MemoryUse memory() const = 0;
  /// What a single process would hold, given what the ranks do. Local.
  virtual MemoryUse unsharded(const std::vector<MemoryUse>& ranks) const { return ranks.front(); }

 protected:
  int active_ranks_ = 0;  // 0: all
};

std::unique_ptr<Parallel> make_unsharded(const Config& config, Trainee trainee);
std::unique_ptr<Parallel> make_ddp(const Config& config, Trainee trainee, ProcessGroup group);
std::unique_ptr<Parallel> make_zero(const Config& config, Trainee trainee, ProcessGroup group);
std::unique_ptr<Parallel> make_fsdp(const Config& config, Trainee trainee, ProcessGroup group);
std::unique_ptr<Parallel> make_distributed(const Config& config, Trainee trainee, ProcessGroup group);

/// Of the scalars of those ranks that have one; `active`: how many do, 0 for all. A collective.
double mean_over_ranks(const at::Tensor& scalar, ProcessGroup group, int active = 0);

/// By `parallel.type`. A collective.
std::unique_ptr<Parallel> make_parallel(const Config& config, Trainee trainee, ProcessGroup group);

}  // namespace tessera::train
