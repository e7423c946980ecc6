#pragma once

#include <cstdint>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera {

/// The distribution of parameters over ranks. Pure arithmetic: every rank computes the same result.
enum class Partition {
  /// The concatenation of all parameters is cut into equal parts, so a parameter may lie on several
  /// ranks. Only for element-wise optimizers. Follows ZeRO (Rajbhandari et al., 2020).
  flat,
  /// Each parameter lies on one rank. Parameters are sorted by size, largest first (stable sort);
  /// each goes to the rank with the fewest elements so far, the lowest rank in a tie. Follows
  /// PyTorch's ZeroRedundancyOptimizer.
  whole,
  /// As `whole`, but in the order of registration instead of sorted.
  first_fit,
};

/// Returns "flat", "whole" or "first_fit".
const char* partition_name(Partition partition);

/// Returns the rank of each parameter, given the parameters' sizes in elements. `load` has one
/// entry for each rank, the elements that it already has, and is updated; pass it on to the next
/// parameter group. `partition` must be whole or first_fit.
std::vector<int> assign_owners(const std::vector<int64_t>& sizes, std::vector<int64_t>& load,
                               Partition partition);

}  // namespace tessera
#pragma GCC visibility pop
