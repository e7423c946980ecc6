#include "tessera/distributed_data_parallel.h"

#include <utility>

#include "ddp/ddp_reduction.h"

namespace tessera {
class DistributedDataParallelBase::Impl {
 public:
  Impl(torch::nn::Module& module, const ProcessGroup& group, Options the_options)
      : options(std::move(the_options)), model(module, group, options), reduction(model, options) {}

  const Options options;
  DdpModel model;
  DdpReduction reduction;
};

DistributedDataParallelBase::DistributedDataParallelBase(torch::nn::Module& module,
                                                         ProcessGroup group, Options options)
    : impl_(std::make_unique<Impl>(module, group, std::move(options))) {}
DistributedDataParallelBase::~DistributedDataParallelBase() = default;
DistributedDataParallelBase::DistributedDataParallelBase(DistributedDataParallelBase&&) noexcept =
    default;

void DistributedDataParallelBase::before_forward() { impl_->reduction.before_forward(); }
NoSync DistributedDataParallelBase::no_sync() {
  return NoSync([impl = impl_.get()](int change) { impl->reduction.reducer().hold_sync(change); });
}
void DistributedDataParallelBase::wait() { impl_->reduction.wait(); }
void DistributedDataParallelBase::end_step(StepEnd end) { impl_->reduction.end_step(end); }
void DistributedDataParallelBase::with_shared_write(const std::function<void()>& write) {
  impl_->model.with_shared_write(write);
}
int64_t DistributedDataParallelBase::parameter_bytes() const {
  return impl_->model.parameter_bytes();
}
size_t DistributedDataParallelBase::buckets() const {
  return impl_->reduction.reducer().buckets().size();
}

int64_t DistributedDataParallelBase::gradient_bytes() const {
  int64_t bytes = 0;
  for (const auto& bucket : impl_->reduction.reducer().buckets()) bytes += bucket.bytes();
  return bytes;
}

void DistributedDataParallelBase::shadow_backward() { impl_->reduction.shadow(); }
void DistributedDataParallelBase::shadow_step() { impl_->reduction.shadow(); }
ProcessGroup DistributedDataParallelBase::join_group() const { return impl_->model.group; }
void DistributedDataParallelBase::on_join_iteration(const JoinIteration& iteration) {
  impl_->reduction.set_join(iteration);
}
void DistributedDataParallelBase::finish_join(int last_active_rank) {
  impl_->model.broadcast(last_active_rank);
}

}  // namespace tessera
