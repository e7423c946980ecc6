#include "tessera/distributed_data_parallel.h"
#include "tessera/power_sgd.h"
#include "train/parallel.h"
#include "train/whole_model.h"

namespace tessera::train {
namespace {

DistributedDataParallelOptions ddp_options(const ParallelConfig& config) {
  DistributedDataParallelOptions options;
  options.first_bucket_mb = config.first_bucket_mb;
  options.bucket_cap_mb = config.bucket_cap_mb;
  options.find_unused_parameters = config.find_unused_parameters;
  options.static_graph = config.static_graph;
  options.broadcast_buffers = config.broadcast_buffers;
  options.gradient_as_bucket_view = config.gradient_as_bucket_view;
  if (config.comm_hook == "fp16") options.comm_hook = fp16_compress_hook();
  if (config.comm_hook == "bf16") options.comm_hook = bf16_compress_hook();
  if (config.comm_hook == "power_sgd") {
    PowerSgdOptions power;
    power.rank = config.power_sgd_rank;
    power.start_iteration = config.power_sgd_start_iteration;
    power.min_compression_rate = config.power_sgd_min_compression_rate;
    options.comm_hook = PowerSgd(power).hook();
  }
  return options;
}

/// Every rank has everything; backward leaves the same mean gradient on all.
class DataParallelTraining : public Parallel {
 public:
  DataParallelTraining(const Config& config, Trainee trainee, ProcessGroup group)
      : group_(group),
        ddp_(std::move(trainee), std::move(group), ddp_options(config.parallel)),
        model_(config.optimizer, *ddp_.module()) {}

  at::Tensor forward(const Batch& batch) override { return ddp_(batch); }
  at::Tensor evaluate(const Batch& batch) override { return ddp_.module().loss(batch); }
  void backward(const at::Tensor& loss) override { loss.backward(); }

  StepFigures step(const at::Tensor& loss, std::optional<double> max_norm) override {
    const double norm = model_.step(max_norm);
    return {mean_over_ranks(loss, group_, active_ranks_), norm};
  }

  Joinable* joinable() override { return &ddp_; }
  void shadow_backward() override { ddp_.shadow_backward(); }
  double lr() const override { return model_.lr(); }
  void set_lr(double lr) override { model_.set_lr(lr); }
  MemoryUse memory() const override {
    MemoryUse use = model_.memory();
    use.gradients = ddp_.gradient_bytes();
    return use;
  }

 private:
  ProcessGroup group_;
  DistributedDataParallel<Trainee> ddp_;
  WholeModel model_;
};

}  // namespace

std::unique_ptr<Parallel> make_ddp(const Config& config, Trainee trainee, ProcessGroup group) {
  return std::make_unique<DataParallelTraining>(config, std::move(trainee), std::move(group));
}

}  // namespace tessera::train
