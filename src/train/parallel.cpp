#include "train/parallel.h"

namespace tessera::train {

double mean_over_ranks(const at::Tensor& scalar, ProcessGroup group, int active) {
  const at::Tensor sum = scalar.defined() ? scalar.detach().to(at::kDouble, false, true).reshape({1})
                                          : at::zeros({1}, at::TensorOptions().dtype(at::kDouble).device(group.control_device()));
  group.all_reduce(sum);
  return sum.item<double>() / (active ? active : group.size());
}

std::unique_ptr<Parallel> make_parallel(const Config& config, Trainee trainee, ProcessGroup group) {
  if (config.parallel.type == "DistributedDataParallel") {
    return make_ddp(config, std::move(trainee), std::move(group));
  }
  if (config.parallel.type == "ZeroRedundancyOptimizer") {
    return make_zero(config, std::move(trainee), std::move(group));
  }
  if (config.parallel.type == "DistributedOptimizer") {
    return make_distributed(config, std::move(trainee), std::move(group));
  }
  if (config.parallel.type == "FullyShardedDataParallel") {
    return make_fsdp(config, std::move(trainee), std::move(group));
  }
  return make_unsharded(config, std::move(trainee));
}

}  // namespace tessera::train
