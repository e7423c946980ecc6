#pragma once

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "tessera/join.h"
#include "tessera/process_group.h"
#include "tessera/step/comm_hook.h"
#include "tessera/step/no_sync.h"

namespace tessera {

struct DistributedDataParallelOptions {
  double first_bucket_mb =
      1;  ///< MiB of gradients in the bucket that is sent first; small, to start early.
  double bucket_cap_mb = 25;  ///< Of the others. > 0
  bool broadcast_buffers =
      true;  ///< Rank 0's buffers are given to all before each forward in training mode.
  /// Parameters may get no gradient in a backward; costs one small collective. Off, that is an
  /// error on every rank.
  bool find_unused_parameters = false;
  /// Which parameters are used, and how often, never changes: learned in the first backward.
  bool static_graph = false;
  /// `.grad` are windows of the buckets: no copy after the reduction. On CPUs none before it
  /// either, where backward's graph is that of the last step: gradients are computed there.
  bool gradient_as_bucket_view = true;
  std::vector<std::string> parameters_to_ignore = {};  ///< Names; neither broadcast nor reduced.
  CommHook comm_hook = {};                             ///< Empty: the mean.
};

namespace detail {

/// What does not depend on the model's type.
class DataParallel {
 public:
  DataParallel(torch::nn::Module& module, ProcessGroup group,
               DistributedDataParallelOptions options);
  ~DataParallel();

  void before_forward();
  void set_sync(bool sync);
  bool sync() const;
  int64_t gradient_bytes() const;
  size_t buckets() const;
  ProcessGroup group() const;
  void on_join_iteration(const JoinIteration& iteration);
  void shadow_backward();
  void finish_join(int last_active_rank);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace detail

/// Data parallelism (Li et al., 2020): every rank has the whole model; backward averages the
/// gradients over the ranks, bucket by bucket while it runs, so that `.grad` afterwards equals the
/// gradient of the mean loss over all ranks' data.
///
///   Net net;  tessera::DistributedDataParallel ddp(net, world);
///   auto loss = loss_of(ddp(x), y);  loss.backward();  optimizer.step();
///
/// `Module`: a torch::nn::ModuleHolder, a shared_ptr to a module, or a pointer to one; it stays
/// usable by itself. Construction is collective: rank 0's parameters and buffers go to all;
/// UsageError on every rank, naming the first difference, when models differ. Every backward under
/// sync is collective. A gradient that is missing (without find_unused_parameters) or arrives twice
/// is a UsageError naming the parameters and the rank; never a hang. Unequal amounts of data:
/// join().
template <class Module>
class DistributedDataParallel : public Joinable {
 public:
  using Options = DistributedDataParallelOptions;

  explicit DistributedDataParallel(Module module, ProcessGroup group, Options options = {})
      : module_(std::move(module)),
        core_(std::make_unique<detail::DataParallel>(*module_, std::move(group),
                                                     std::move(options))) {}

  /// The module's forward.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) {
    core_->before_forward();
    return module_->forward(std::forward<Args>(args)...);
  }

  Module& module() { return module_; }

  /// While alive, backward passes accumulate locally and nothing is sent; the next one outside
  /// sends the sum. Local; on all ranks alike, around forward and backward.
  [[nodiscard]] NoSync no_sync() {
    return NoSync(core_->sync(), [core = core_.get()](bool sync) { core->set_sync(sync); });
  }

  int64_t gradient_bytes() const { return core_->gradient_bytes(); }  ///< On this rank. Local.
  size_t buckets() const { return core_->buckets(); }                 ///< How many. Local.

  /// The collectives of one forward and backward of the other ranks, for a rank without data: its
  /// gradients count as zero, and it gets the mean. Collective. Joinable's: the same.
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
