#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// The results of a model's forward pass in training, by name, in the model's order. Entries whose
/// names contain "loss" are losses; the others are only reported. A list holds several losses of
/// one kind, such as one for each level.
using Losses =
    std::vector<std::pair<std::string, std::variant<at::Tensor, std::vector<at::Tensor>>>>;

struct ParsedLosses {
  at::Tensor total;  ///< A scalar with its autograd graph, for backward().
  /// Detached scalars: the total as "loss", then every other entry in the given order. A model's
  /// own entry "loss" is part of the total and is not listed.
  std::vector<std::pair<std::string, at::Tensor>> values;
};

/// The value of a tensor is the mean of its elements, the value of a list is the sum of its
/// tensors' means. `total` is the sum of the entries whose name contains "loss". Follows mmengine's
/// BaseModel.parse_losses, except that having no loss is an error here and not 0. Local. Throws
/// UsageError naming the entry for an undefined or empty tensor, an empty list, a dtype that has no
/// mean (integers) or a repeated name, and naming all entries if none is a loss.
ParsedLosses parse_losses(const Losses& losses);

}  // namespace tessera
#pragma GCC visibility pop
