#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/config/option_map.h"
#include "tessera/optim/optimizer_state_dict.h"

namespace tessera {

/// What one custom key asks for.
struct ParamwiseCustomKey {
  std::optional<double> lr_mult = {};     ///< >= 0; unset: 1
  std::optional<double> decay_mult = {};  ///< >= 0; unset: 1
  OptionMap options =
      {};  ///< Copied as they are: any option of the optimizer. An `lr` here beats lr_mult.
};

struct ParamwiseOptions {
  /// Of parts of parameters' names, such as "backbone" or ".bias". The key that matches decides
  /// alone: no other rule applies.
  std::map<std::string, ParamwiseCustomKey> custom_keys = {};
  std::optional<double> bias_lr_mult =
      {};  ///< Parameters called "bias", but not those of normalisations.
  std::optional<double> bias_decay_mult = {};    ///< Parameters called "bias".
  std::optional<double> norm_decay_mult = {};    ///< All parameters of normalisations.
  std::optional<double> flat_decay_mult = {};    ///< Parameters of one dimension.
  std::optional<double> dwconv_decay_mult = {};  ///< All parameters of depth-wise convolutions.
  bool bypass_duplicate =
      false;  ///< A tensor with several names counts once, under the first; off: an error.
};

/// Parameters that share options: `options` is complete, base included.
struct ParameterGroup {
  NamedParameters parameters;
  OptionMap options;
};

/// The parameters of `module`, frozen ones included, in groups by the rules of mmengine's
/// DefaultOptimWrapperConstructor. Multipliers apply to `base`'s lr and weight_decay, the options
/// of the optimizer.
///
/// - A custom key matches a parameter whose name (".weight" for a "weight" of the root module)
/// contains it; of several the
///   longest wins, and of equal length the first in the alphabet.
/// - Otherwise the first of these that applies and is given decides the decay: norm, bias,
/// depth-wise, flat.
/// - Normalisations: BatchNorm, InstanceNorm, LayerNorm, GroupNorm, SyncBatchNorm and what derives
/// from them. Depth-wise:
///   Conv1d to 3d with as many groups as input channels, more than one.
/// - Frozen parameters take `base` as it is.
///
/// Parameters of equal options share a group; groups and parameters are in the order of
/// named_parameters(). Local. UsageError for an impossible multiplier, a multiplier of an option
/// that `base` does not have, a tensor with two names, a custom key that matches nothing (with the
/// nearest name).
std::vector<ParameterGroup> paramwise_groups(const torch::nn::Module& module,
                                             const ParamwiseOptions& options,
                                             const OptionMap& base);

}  // namespace tessera
