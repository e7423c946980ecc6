#include "train/program/group_options.h"

#include "tessera/train/devices.h"

namespace tessera::train {

ProcessGroupOptions group_options(const Config& config) {
  auto options = config.parallel.group;
  if (options.backend != Backend::NCCL)
    options.staged_device = seen_device_type(config.model.device);
  return options;
}

}  // namespace tessera::train
