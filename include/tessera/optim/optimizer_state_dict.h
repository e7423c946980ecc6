#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer_state.h"

namespace tessera {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters of a module, trainable and frozen, with their dotted names. A tied parameter
/// appears once, under its first name.
NamedParameters named_parameters(const torch::nn::Module& module);

/// The whole state of an optimizer, keyed by parameter name. It does not depend on addresses, the
/// libtorch version, the world size or the sharding. Tensors that follow a parameter have its
/// shape. Parameters that were never stepped have no entry.
struct OptimizerStateDict {
  struct Group {
    std::vector<std::string> parameters;
    OptionMap options;
  };
  std::vector<Group> groups;
  std::map<std::string, ParamState> state;
};

/// The state dict of a plain optimizer. `parameters` must name every parameter of the optimizer.
/// The tensors are copies on the CPU. Local.
OptimizerStateDict state_dict(const torch::optim::Optimizer& optimizer,
                              const NamedParameters& parameters);

/// Loads state and options into a plain optimizer; the tensors are copied. Throws UsageError that
/// names the parameter when groups, names or shapes do not match; the optimizer is then unchanged.
/// Local.
void load_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                     const OptimizerStateDict& dict);

}  // namespace tessera
