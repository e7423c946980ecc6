#pragma once

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <torch/torch.h>

namespace tessera {

/// What a model's forward gives in training, by name and in its order: losses, whose names contain
/// "loss", and figures that are only shown. A list is several losses of one kind, such as one a
/// level.
using Losses =
    std::vector<std::pair<std::string, std::variant<at::Tensor, std::vector<at::Tensor>>>>;

struct ParsedLosses {
  at::Tensor total;  ///< A scalar with its graph: what backward starts from.
  std::vector<std::pair<std::string, at::Tensor>>
      values;  ///< Every entry as a scalar, detached, in the given order.
};

/// A tensor counts as the mean of its elements, a list as the sum of its tensors' means; `total` is
/// the sum of those whose name contains "loss". (mmengine: BaseModel.parse_losses; but no loss at
/// all is an error here, not 0.) Local. UsageError naming the entry for an undefined or empty
/// tensor, an empty list, a dtype that has no mean (integers), a repeated name; and naming all
/// entries when none is a loss.
ParsedLosses parse_losses(const Losses& losses);

}  // namespace tessera
