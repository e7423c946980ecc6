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

#include "tessera/join.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/comm_hook.h"
#include "tessera/step/no_sync.h"

namespace tessera {

struct DistributedDataParallelOptions {
  /// MiB of gradients in the bucket that is reduced first, > 0. A small value starts the first
  /// reduction early.
  double first_bucket_mb = 1;
  /// MiB of gradients in each of the other buckets, > 0. Unless given: 25 on one host, and with
  /// comm_hook or wire.gradients. On several hosts, construction times some all-reduces and takes
  /// a power of two from 1 to 16, or 25, whose latency is at most 1/16 of its time. Results do not
  /// depend on it.
  std::optional<double> bucket_cap_mb = {};
  /// In training mode all ranks get the same buffers, by this rule, before each forward pass and
  /// after each backward pass, unless gradients are disabled or no_sync() is active. So evaluation
  /// and saving see the same values everywhere. PyTorch's broadcast_buffers = false is
  /// BufferSync::none.
  BufferSync buffers = BufferSync::broadcast;
  /// On: parameters may get no gradient in a backward pass; costs one small collective. Off: a
  /// missing gradient is an error on every rank.
  bool find_unused_parameters = false;
  /// On: the caller promises that every step uses the same parameters equally often. The first
  /// backward pass determines them; another set or number in a later one is an error on every
  /// rank.
  bool static_graph = false;
  /// On: backward returns before its reductions have ended, so that they overlap with the
  /// optimizer's step, and with step_in_background() with the next forward. Until its reduction has
  /// ended, a gradient has no memory, and the first operator that takes it (or a view or detached
  /// alias of it) waits. Results are bit-identical. step() of the fused optimizers updates each
  /// bucket when it has arrived; other optimizers, and clipping, wait for the gradients in the
  /// order in which they take them. Call wait_for_gradients() before code that uses data_ptr() of a
  /// gradient. If a rank is lost, step() throws BrokenWorldError, and it may have updated a part of
  /// the parameters. Needs trainable parameters on the CPU, and no
  /// comm_hook; otherwise a UsageError. No effect in a world of one rank. Switched off, with a line
  /// in the log, if another library has taken the dispatch key that detects the use of gradients.
  bool reduce_in_background = false;
  /// Names of parameters that are neither broadcast nor reduced. UsageError for a name that the
  /// module does not have.
  std::vector<std::string> parameters_to_ignore = {};
  /// On: the ranks of a host have one copy of the parameters that are frozen at construction, in
  /// memory that all of them map. Of several hosts each gets rank 0's values. An operator that
  /// writes to such a parameter is a UsageError that names it, also after this object was
  /// destroyed: use with_shared_write(). A write through data_ptr() is not noticed. No effect where
  /// each host has one rank. UsageError for frozen parameters that are not on the CPU, where the
  /// ranks of a host share no memory, and where another library has taken the dispatch key that
  /// detects writes.
  bool share_parameters = false;
  /// Replaces the averaging of a bucket. Empty: the mean.
  CommHook comm_hook = {};
  /// How gradients travel between hosts. Both halves of the all-reduce are rounded. UsageError for
  /// wire.parameters, and with comm_hook.
  WireOptions wire = {};
};

namespace detail {

/// The part of DistributedDataParallel that does not depend on the model's type.
class DataParallel {
 public:
  DataParallel(torch::nn::Module& module, ProcessGroup group,
               DistributedDataParallelOptions options);
  ~DataParallel();

  void before_forward();
  void wait_for_gradients();
  void step_in_background(torch::optim::Optimizer& optimizer);
  void hold_sync(int change);
  int64_t gradient_bytes() const;
  size_t buckets() const;
  ProcessGroup group() const;
  void on_join_iteration(const JoinIteration& iteration);
  void shadow_backward();
  void finish_join(int last_active_rank);
  void with_shared_write(const std::function<void()>& write);
  void update_wire_feedback(bool stepped);
  void rescale_wire_feedback(double factor);
  int64_t parameter_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

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
class DistributedDataParallel : public Joinable {
 public:
  using Options = DistributedDataParallelOptions;

  explicit DistributedDataParallel(Module module, ProcessGroup group, Options options = {})
      : module_(std::move(module)),
        core_(std::make_unique<detail::DataParallel>(*module_, std::move(group),
                                                     std::move(options))) {}

  /// Calls the module's forward(). Collective if buffers are synchronised; otherwise local, so that
  /// one rank alone may evaluate (under eval() or NoGradGuard). UsageError on every rank if the
  /// module's parameters were replaced after construction (module->to(dtype)).
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    core_->before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }

  /// While the result is alive, backward passes accumulate gradients locally and send nothing; the
  /// next backward pass outside sends the sum. Put forward and backward inside it, on all ranks in
  /// the same way. Local.
  [[nodiscard]] NoSync no_sync() {
    return NoSync([core = core_.get()](int change) { core->hold_sync(change); });
  }

  /// With reduce_in_background: returns when the gradients of the last backward have arrived, and
  /// the parameters that step_in_background() updates from them have their values. Otherwise
  /// returns at once. BrokenWorldError if a rank was lost. Local; blocks.
  void wait_for_gradients() { core_->wait_for_gradients(); }

  /// As optimizer.step(), for reduce_in_background, but it does not wait for gradients under way. A
  /// parameter that has one is updated when that has arrived, by the options that the optimizer has
  /// now. Until then the parameter and its state in the optimizer have no memory, and the first
  /// operator that takes one of them waits, as with gradients. So the next forward computes its
  /// first layers while gradients of other layers travel. Gradients may be reset at once; what
  /// writes zeros to them waits. Results are bit-identical.
  /// For FusedSGD, FusedAdam and FusedAdamW, and parameters that are contiguous and float32 when
  /// the wrapper is made, and of whose memory no alias exists then. With other ones, in a world of
  /// one rank and without the option it is optimizer.step(). Call wait_for_gradients() before
  /// torch::save(), and before code that uses data_ptr() of a parameter or of optimizer state. If a
  /// rank is lost, the operator that waits throws BrokenWorldError, and a part of the parameters
  /// may have been updated. If rank 0 calls it in the first step, the second backward chooses the
  /// order in which buckets are reduced, by measured times. Local; blocks only for the update of an
  /// earlier step.
  void step_in_background(torch::optim::Optimizer& optimizer) {
    core_->step_in_background(optimizer);
  }

  /// For loops that drop the gradients of some backwards, with wire.gradients. Call it after every
  /// step: `stepped` says whether the optimizer has used the gradients since the last call. With
  /// false the next gradients get what rounding took from those of the last used step, and not what
  /// it took from the dropped ones. Without any call, gradients count as used. Outside of backward.
  /// Local; does not block. All ranks make the same calls.
  void update_wire_feedback(bool stepped) { core_->update_wire_feedback(stepped); }
  /// For loss scaling, with wire.gradients: the scale of the loss is `factor` times what it was, so
  /// what rounding took from the last gradients is multiplied by it. Call it between a step and the
  /// next backward, after update_wire_feedback(). UsageError unless `factor` is finite and > 0.
  /// Local; does not block. All ranks make the same calls.
  void rescale_wire_feedback(double factor) { core_->rescale_wire_feedback(factor); }

  /// Runs `write`, which changes parameters or buffers in place, for example by load_state_dict().
  /// With share_parameters: when all ranks have called it, on the first rank of each host; the
  /// other parameters and the buffers are then broadcast from rank 0. Elsewhere: on every rank.
  /// `write` runs without gradients and calls no collective. If it throws on a rank, every rank
  /// throws AgreedError. Collective; returns when all ranks may read.
  void with_shared_write(const std::function<void()>& write) { core_->with_shared_write(write); }

  /// Bytes of the parameters on this rank. With share_parameters the frozen ones count with this
  /// rank's equal part of the host's copy. Local.
  int64_t parameter_bytes() const { return core_->parameter_bytes(); }
  /// Bytes of the buckets on this rank. Local.
  int64_t gradient_bytes() const { return core_->gradient_bytes(); }
  /// Number of buckets. Local.
  size_t buckets() const { return core_->buckets(); }

  /// For a rank without data: makes the collectives of one forward and backward pass of the other
  /// ranks. This rank's gradients count as zero, and it gets the mean. Collective. shadow_step()
  /// does the same.
  void shadow_backward() { core_->shadow_backward(); }
  ProcessGroup join_group() const override { return core_->group(); }
  void on_join_iteration(const JoinIteration& iteration) override {
    core_->on_join_iteration(iteration);
  }
  void shadow_step() override { core_->shadow_backward(); }
  void finish_join(int last_active_rank) override { core_->finish_join(last_active_rank); }

 private:
  Module module_;
  std::unique_ptr<detail::DataParallel> core_;
};

}  // namespace tessera
