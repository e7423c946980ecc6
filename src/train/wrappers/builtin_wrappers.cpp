#include "train/builtins/builtin_components.h"

namespace tessera::train {

// Each is defined beside its wrapper class, in this folder.
WrapperPlan read_unsharded(OptionReader& options);
WrapperPlan read_ddp(OptionReader& options);
WrapperPlan read_zero(OptionReader& options);
WrapperPlan read_distributed(OptionReader& options);
WrapperPlan read_fsdp(OptionReader& options);

void add_wrappers(Registry<WrapperPlan>& wrappers) {
  wrappers.add("none", read_unsharded, "one rank with an ordinary optimizer");
  wrappers.add("DistributedDataParallel", read_ddp,
               "every rank has the whole model; gradients are averaged");
  wrappers.add("ZeroRedundancyOptimizer", read_zero, "the optimizer state is sharded");
  wrappers.add("DistributedOptimizer", read_distributed,
               "MegEngine's: the optimizer reduces the gradients, in packs");
  wrappers.add("FullyShardedDataParallel", read_fsdp,
               "parameters, gradients and optimizer state are sharded");
}

}  // namespace tessera::train
