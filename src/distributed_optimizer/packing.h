#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::distributed_optimizer {

/// What the packing looks at.
struct PackItem {
  std::string dtype;  ///< Of one kind are packed together: "float32", with the device behind where
                      ///< it is not the CPU.
  int64_t bytes = 0;
};

using Packs = std::vector<std::vector<size_t>>;

/// Gradients that are sent together, in the order in which they are sent. `order`: indices into
/// `items` as they arrived. The first 8 are packs of one. Then each kind collects, and a pack is
/// closed when its bytes exceed `threshold` after adding. What is left over is flushed in the order
/// of the kinds' names.
Packs pack_by_arrival(const std::vector<PackItem>& items, const std::vector<size_t>& order,
                      int64_t threshold);

/// "0 4,5 1": packs as text, as rank 0 publishes them.
std::string to_text(const Packs& packs);
Packs packs_from_text(const std::string& text);

}  // namespace tessera::distributed_optimizer
