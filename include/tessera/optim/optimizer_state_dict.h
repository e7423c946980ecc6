#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer_state.h"

#pragma GCC visibility push(default)
namespace tessera {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters of a module, trainable and frozen, with their dotted names. A tied parameter
/// appears once, under its first name.
NamedParameters named_parameters(const torch::nn::Module& module);

/// Names for parameters that have none: their numbers in the list, from "0", as in the state dicts
/// of PyTorch's torch.optim.
NamedParameters numbered_parameters(const std::vector<at::Tensor>& parameters);

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
/// The same with the numbers of the parameters, over all groups, as names.
OptimizerStateDict state_dict(const torch::optim::Optimizer& optimizer);

/// Loads state and options into a plain optimizer; the tensors are copied. Throws UsageError that
/// names the parameter when groups, names or shapes do not match; the optimizer is then unchanged.
/// Without `strict` groups and names may differ: a parameter that is not in `dict` starts anew, one
/// that is not in the optimizer is left out, and a group takes the options of the group of `dict`
/// that has its first known parameter. A different shape always is an error. Local.
void load_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                     const OptimizerStateDict& dict, bool strict = true);
/// The same for parameters by number.
void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerStateDict& dict,
                     bool strict = true);

}  // namespace tessera
#pragma GCC visibility pop
