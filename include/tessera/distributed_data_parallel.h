#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/detail/default_group.h"
#include "tessera/join.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/comm_hook.h"
#include "tessera/step/no_sync.h"
#include "tessera/step/overlap.h"
#include "tessera/step/step_end.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Options of DistributedDataParallel. Every rank gives the same values. docs/ddp.md has more.
struct DistributedDataParallelOptions {
  /// MiB of gradients in the bucket that is reduced first, > 0. A small value starts the first
  /// reduction early.
  double first_bucket_mb = 1;
  /// MiB of gradients in each of the other buckets, > 0. Unless given: 25 on one host, and from the
  /// time of some all-reduces on several hosts. Results do not depend on it.
  std::optional<double> bucket_cap_mb = {};
  /// In training mode all ranks get the same buffers, by this rule, before each forward pass and
  /// after each backward pass, unless gradients are disabled or no_sync() is active.
  BufferSync buffers = BufferSync::broadcast;
  /// On: parameters may lack a gradient in a backward pass; costs one small collective. Off: a
  /// missing gradient is an error on every rank.
  bool find_unused_parameters = false;
  /// On: the caller promises that every step uses the same parameters equally often. The first
  /// backward pass determines them; a later pass with another set or number is an error on every
  /// rank.
  bool static_graph = false;
  /// The time of reductions. `background`: step() of FusedSGD, FusedAdam and FusedAdamW returns
  /// before its parameters are updated too.
  Overlap overlap = Overlap::backward;
  /// Names of parameters that are neither broadcast nor reduced. UsageError for a name that the
  /// module does not have.
  std::vector<std::string> parameters_to_ignore = {};
  /// On: the ranks of a host have one copy of the parameters that are frozen at construction, in
  /// memory that all of them map. Writes to them go through with_shared_write().
  bool share_parameters = false;
  /// Replaces the averaging of a bucket. Empty: the mean.
  CommHook comm_hook = {};
  /// The format of gradients between hosts. Both halves of the all-reduce are rounded. UsageError
  /// for wire.parameters, and with comm_hook.
  WireOptions wire = {};
};

/// The part of DistributedDataParallel that does not depend on the model's type.
class DistributedDataParallelBase : public Joinable {
 public:
  using Options = DistributedDataParallelOptions;

  ~DistributedDataParallelBase() override;
  DistributedDataParallelBase(DistributedDataParallelBase&&) noexcept;

  /// While the result is alive, backward passes accumulate gradients locally and send nothing; the
  /// next backward pass outside sends the sum. Put forward and backward inside it, on all ranks in
  /// the same way. Local.
  [[nodiscard]] NoSync no_sync();

  /// For Overlap::background: returns when the gradients of the last backward have arrived, and the
  /// parameters that are updated from them have their values. Call it before code that uses
  /// data_ptr() of a gradient, a parameter or optimizer state, and before torch::save().
  /// BrokenWorldError if a rank was lost. Local; blocks.
  void wait();

  /// With wire.gradients, for loops that drop the gradients of some backwards or scale the loss:
  /// tells how the step ended. Call it after every step, before the next backward. Without any
  /// call, gradients count as used. UsageError unless `end.scale` is finite and > 0. Local; waits
  /// as wait(). All ranks make the same calls.
  void end_step(StepEnd end);

  /// Runs `write`, which changes parameters or buffers in place, for example by load_state_dict().
  /// With share_parameters it runs when all ranks have made this call, on the first rank of each
  /// host, and rank 0 then broadcasts the other parameters and the buffers. Otherwise it runs on
  /// every rank. `write` runs without gradients and calls no collective. If it throws on a rank,
  /// every rank throws AgreedError. Collective; returns when all ranks may read.
  void with_shared_write(const std::function<void()>& write);

  /// Bytes of the parameters on this rank. With share_parameters, frozen parameters count with this
  /// rank's equal part of the host's copy. Local.
  int64_t parameter_bytes() const;
  /// Bytes of the buckets on this rank. Local.
  int64_t gradient_bytes() const;
  /// Number of buckets. Local.
  size_t buckets() const;

  /// For a rank without data: makes the collectives of one forward and backward pass of the other
  /// ranks. This rank's gradients count as zero, and it gets the mean. Collective. shadow_step()
  /// does the same.
  void shadow_backward();
  ProcessGroup join_group() const override;
  void on_join_iteration(const JoinIteration& iteration) override;
  void shadow_step() override;
  void finish_join(int last_active_rank) override;

 protected:
  DistributedDataParallelBase(torch::nn::Module& module, ProcessGroup group, Options options);
  void before_forward();

 private:
  class [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// Data parallelism (Li et al., 2020). Every rank has the whole model. While backward runs, the
/// gradients are averaged over the ranks, bucket by bucket. Afterwards `.grad` is the gradient of
/// the mean of all ranks' losses.
///
///   Net net;  tessera::DistributedDataParallel ddp(net, world);
///   auto loss = loss_of(ddp(x), y);  loss.backward();  optimizer.step();
///
/// `Module` is a torch::nn::ModuleHolder, a shared_ptr to a module or a pointer to one. The module
/// itself stays usable.
///
/// Construction is collective: it broadcasts rank 0's parameters and buffers. If the models or the
/// options differ between ranks, every rank throws UsageError naming the first difference. Every
/// backward pass outside no_sync() is collective. A missing gradient (without
/// find_unused_parameters), a gradient that arrives twice, or a parameter that forward has written
/// with other values on each rank is a UsageError that names the parameters and the rank, never a
/// hang. With create_graph `.grad` keeps its graph: derivatives flow into this rank's own part. For
/// unequal amounts of data use join().
template <class Module>
class DistributedDataParallel : public DistributedDataParallelBase {
 public:
  explicit DistributedDataParallel(Module module, ProcessGroup group, Options options = {})
      : DistributedDataParallelBase(*module, std::move(group), std::move(options)),
        module_(std::move(module)) {}
  /// The same in default_process_group(). UsageError if there is none.
  explicit DistributedDataParallel(Module module, Options options = {})
      : DistributedDataParallel(std::move(module),
                                detail::default_group_of("DistributedDataParallel"),
                                std::move(options)) {}

  /// Calls the module's forward(). Collective if buffers are synchronised; otherwise local, so that
  /// one rank alone may evaluate (under eval() or NoGradGuard). UsageError on every rank if the
  /// module's parameters were replaced after construction (module->to(dtype)).
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }

 private:
  Module module_;
};

}  // namespace tessera
#pragma GCC visibility pop
