#include "tessera/distributed_optimizer.h"
#include "train/wrappers/whole_wrapper.h"
#include "train/wrappers/wrapper_functions.h"

namespace tessera::train {
namespace {

/// After MegEngine: the optimizer reduces the gradients and updates all parameters on every rank.
class DistributedWrapper : public WholeWrapper {
 public:
  DistributedWrapper(WrapperContext context, const DistributedOptimizerOptions& options)
      : WholeWrapper(std::move(context)),
        distributed_(shared_optimizer(), named(),
                     std::vector<std::optional<ProcessGroup>>(
                         shared_optimizer()->param_groups().size(), group_),
                     options) {
    distributed_.track_buffers(*model_.module);
    buffers_are_equal_ = options.buffers != BufferSync::none;
  }

  void backward(const at::Tensor& loss) override { distributed_.backward(loss); }
  void shadow_backward() override { distributed_.shadow_backward(); }
  std::unique_ptr<NoSync> no_sync() override {
    return std::unique_ptr<NoSync>(new NoSync(distributed_.no_sync()));
  }
  Joinable* joinable() override { return &distributed_; }
  void end_step(StepEnd end) override { distributed_.end_step(end); }

 protected:
  void step() override { distributed_.step(); }

 private:
  DistributedOptimizer distributed_;
};

}  // namespace

WrapperPlan read_distributed(OptionReader& options) {
  DistributedOptimizerOptions distributed;
  options.require("reduce_method", "sum or mean");
  options.read_choice("reduce_method", distributed.reduce_method, {"sum", "mean"},
                      "what all ranks get of their gradients");
  options.read(
      "bcast_period", distributed.bcast_period,
      "updates from one broadcast of rank 0's parameters to the next; 0: at construction alone, "
      "-1: never",
      Range{-1});
  options.read("param_pack", distributed.param_pack, "communicate gradients in packs");
  options.read("param_pack_thd", distributed.param_pack_thd, "bytes of a pack", kAtLeastOne);
  std::optional<Overlap> overlap;
  read_overlap(options, overlap);
  distributed.overlap = overlap.value_or(distributed.overlap);
  read_buffers(options, distributed.buffers);
  read_wire(options, distributed.wire, false);
  options.finish();
  WrapperPlan plan;
  plan.make = [distributed](WrapperContext context) {
    return std::make_unique<DistributedWrapper>(std::move(context), distributed);
  };
  return plan;
}

}  // namespace tessera::train
