#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// How parameters are dealt to ranks. Pure arithmetic, the same on every rank.
enum class Partition {
  /// The concatenation of all parameters is cut into equal parts; a parameter may straddle ranks.
  /// Only for element-wise
  /// optimizers. Follows ZeRO (Rajbhandari et al., 2020).
  flat,
  /// Whole parameters: sorted by size, largest first (stable), each to the rank with the least so
  /// far, ties to the lowest
  /// rank. Follows PyTorch's ZeroRedundancyOptimizer.
  whole,
  /// As `whole`, in the order of registration, unsorted.
  first_fit,
};

/// "flat", "whole", "first_fit".
const char* partition_name(Partition partition);

/// Owner of each of `sizes` (elements). `load`, one entry a rank, is what each rank holds already
/// and is updated: it carries over parameter groups. partition must be whole or first_fit.
std::vector<int> assign_owners(const std::vector<int64_t>& sizes, std::vector<int64_t>& load,
                               Partition partition);

}  // namespace tessera
