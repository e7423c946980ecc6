#include "tessera/train.h"
#include "train/run.h"

namespace tessera {

TrainResult run_training(const Config& config, ProcessGroup group) {
  return train::Run(config, std::move(group)).run();
}

}  // namespace tessera
