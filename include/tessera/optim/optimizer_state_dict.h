#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "tessera/optim/optimizer_state.h"

namespace tessera {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

/// The trainable and frozen parameters of a module with their dotted names; a tied parameter
/// appears once, under its first name.
NamedParameters named_parameters(const torch::nn::Module& module);

/// The whole state of an optimizer, keyed by parameter name: independent of addresses, libtorch
/// generations, world sizes and of how the optimizer was sharded. Tensors that follow a parameter
/// have its shape. Parameters never stepped have no entry.
struct OptimizerStateDict {
  struct Group {
    std::vector<std::string> parameters;
    OptionMap options;
  };
  std::vector<Group> groups;
  std::map<std::string, ParamState> state;
};

/// Of a plain optimizer. Tensors are copies on the CPU. Local. `parameters` must name each of the
/// optimizer's.
OptimizerStateDict state_dict(const torch::optim::Optimizer& optimizer,
                              const NamedParameters& parameters);

/// Into a plain optimizer: state and options; the caller's tensors are copied. Local. UsageError
/// naming the parameter for groups, names or shapes that do not fit; the optimizer is then
/// unchanged.
void load_state_dict(torch::optim::Optimizer& optimizer, const NamedParameters& parameters,
                     const OptimizerStateDict& dict);

}  // namespace tessera
