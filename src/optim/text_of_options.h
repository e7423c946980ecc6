#pragma once

#include <string>

#include <torch/optim/optimizer.h>

#include "tessera/config/option_map.h"

namespace tessera {

/// "lr 0.1 momentum 0.9", for contracts and tags that compare options between ranks. lr comes
/// first, because a message shows only the beginning of a tag.
std::string text_of_options(const OptionMap& options);
/// The name of the optimizer's class, with that of the inner one of with_master_weights().
std::string text_of_class(const torch::optim::Optimizer& optimizer);

}  // namespace tessera
