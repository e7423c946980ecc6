#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/config/option_map.h"
#include "tessera/optim/optimizer_state_dict.h"

#pragma GCC visibility push(default)
namespace tessera {

/// The options of the parameters that one custom key matches.
struct ParamwiseCustomKey {
  std::optional<double> lr_mult = {};     ///< >= 0. Unset: 1.
  std::optional<double> decay_mult = {};  ///< >= 0. Unset: 1.
  /// Any options of the optimizer, copied unchanged. An `lr` here overrides lr_mult.
  OptionMap options = {};
};

struct ParamwiseOptions {
  /// By part of a parameter's name, such as "backbone" or ".bias". If a key matches a parameter, no
  /// other rule applies to it.
  std::map<std::string, ParamwiseCustomKey> custom_keys = {};
  /// For parameters called "bias", except those of normalisation layers.
  std::optional<double> bias_lr_mult = {};
  std::optional<double> bias_decay_mult = {};    ///< For parameters called "bias".
  std::optional<double> norm_decay_mult = {};    ///< For all parameters of normalisation layers.
  std::optional<double> flat_decay_mult = {};    ///< For parameters of one dimension.
  std::optional<double> dwconv_decay_mult = {};  ///< For all parameters of depth-wise convolutions.
  /// On: a tensor with several names counts once, under its first name. Off: it is an error.
  bool bypass_duplicate = false;
};

/// Parameters that share options. `options` is complete: it includes the base options.
struct ParameterGroup {
  NamedParameters parameters;
  OptionMap options;
};

/// Groups the parameters of `module`, frozen ones included, by the rules of mmengine's
/// DefaultOptimWrapperConstructor. `base` holds the options of the optimizer; multipliers apply to
/// its lr and weight_decay.
///
/// docs/steps.md has the rules as a table. The compared name of a parameter "weight" of the root
/// module is ".weight". Depth-wise convolutions are Conv1d to Conv3d with as many groups as input
/// channels and more than one group. Frozen parameters get `base` unchanged.
///
/// Parameters with equal options share a group. Groups and parameters are in the order of
/// named_parameters(). Local. Throws UsageError for a multiplier out of range, a multiplier of an
/// option that `base` does not have, a tensor with two names, and a custom key that matches no
/// parameter (the message suggests the nearest name).
std::vector<ParameterGroup> paramwise_groups(const torch::nn::Module& module,
                                             const ParamwiseOptions& options,
                                             const OptionMap& base);

}  // namespace tessera
#pragma GCC visibility pop
