#include "train/builtin.h"
#include "train/whole_wrapper.h"

namespace tessera::train {

WrapperPlan read_unsharded(OptionReader& options) {
  options.finish();
  WrapperPlan plan;
  plan.distributed = false;
  plan.make = [](WrapperContext context) { return std::make_unique<WholeWrapper>(std::move(context)); };
  return plan;
}

}  // namespace tessera::train
