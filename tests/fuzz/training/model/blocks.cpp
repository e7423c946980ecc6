#include "fuzz/training/model/blocks.h"

#include <stdexcept>

namespace tessera::fuzz {

const std::vector<std::string>& block_kinds() {
  static const std::vector<std::string> kinds = {"linear",
                                                 "conv1d",
                                                 "conv2d",
                                                 "conv_transpose1d",
                                                 "layer_norm",
                                                 "group_norm",
                                                 "embedding",
                                                 "embedding_bag",
                                                 "rnn",
                                                 "gru",
                                                 "lstm",
                                                 "cell",
                                                 "attention",
                                                 "encoder",
                                                 "prelu",
                                                 "bilinear",
                                                 "sequential",
                                                 "module_list",
                                                 "module_dict",
                                                 "batch_norm",
                                                 "cumulative_norm",
                                                 "instance_norm",
                                                 "counter",
                                                 "random_features",
                                                 "scalar",
                                                 "empty",
                                                 "strided",
                                                 "views",
                                                 "functional",
                                                 "custom",
                                                 "double_layer",
                                                 "bfloat16_layer",
                                                 "half_layer",
                                                 "tied",
                                                 "shared",
                                                 "unused",
                                                 "conditional",
                                                 "experts",
                                                 "checkpoint"};
  return kinds;
}

std::shared_ptr<Block> make_block(const Item& which, int in) {
  for (auto* make : {make_layer_block, make_stateful_block, make_unusual_block})
    if (auto block = make(which, in)) return block;
  throw std::invalid_argument("no block is called " + which.kind);
}

}  // namespace tessera::fuzz
