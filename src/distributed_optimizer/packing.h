#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::distributed_optimizer {

/// A gradient to be packed.
struct PackItem {
  std::string dtype;  ///< "float32" and so on; for tensors not on the CPU with the device appended.
  int64_t bytes = 0;
};

/// Indices of the gradients in each pack.
using Packs = std::vector<std::vector<size_t>>;

/// Distributes gradients over packs and returns the packs in the order in which they are sent.
/// `order` lists indices into `items` in the order of arrival. The first 8 gradients form a pack
/// each. After that, each dtype has an open pack; it is closed when its bytes exceed `threshold`
/// after an item was added. The packs that are open in the end follow, sorted by dtype. Pure.
Packs pack_by_arrival(const std::vector<PackItem>& items, const std::vector<size_t>& order,
                      int64_t threshold);

/// Packs as the text that rank 0 publishes, such as "0 4,5 1".
std::string to_text(const Packs& packs);
Packs packs_from_text(const std::string& text);

}  // namespace tessera::distributed_optimizer
