#pragma once

#include <string>
#include <vector>

#include "tessera/optim/optimizer_state_dict.h"

// The optimizer state of Python's torch.optim, whose state_dict() numbers the parameters instead of
// naming them. All functions are local.

namespace tessera {

/// Reads the state from a file of torch.save: {"state": {0: {…}, …}, "param_groups": […]}. `key`
/// names its dict as in TorchFile; empty: the file's own dict, or the only dict in it that has this
/// form. `parameters`: the names of the parameters in the order in which Python's optimizer got
/// them, usually that of model.parameters(), which is that of named_parameters(). Where the groups
/// have "param_names", those count instead. Steps become integers. Options that the C++ optimizers
/// do not have are left out, if they do not change the update: foreach, fused, capturable,
/// differentiable, decoupled_weight_decay, initial_lr. Tensors keep all bits.
/// Throws UsageError with the file for an option that does change it (maximize), for a number of
/// parameters that is not that of `parameters`, and for what TorchFile refuses.
OptimizerStateDict load_torch_optimizer_state(const std::string& path,
                                              const std::vector<std::string>& parameters,
                                              const std::string& key = "");

/// Writes `dict` in that form, for load_state_dict() of SGD, Adam, AdamW, Adagrad or RMSprop of
/// Python's torch.optim. Parameters are numbered in the order of the groups, so Python's optimizer
/// must have the same groups. Options of Python's optimizers that `dict` does not have get
/// PyTorch's defaults. Throws UsageError for LBFGS, whose state has lists of tensors, and as
/// TorchFileWriter does.
void save_torch_optimizer_state(const OptimizerStateDict& dict, const std::string& path);

}  // namespace tessera
