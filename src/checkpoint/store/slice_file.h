#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/optim/state_slice.h"

namespace tessera::store {

/// A rank's slices as a file's tensors, and their layout. What follows the parameter is
/// one-dimensional.
struct SliceFile {
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // aliases where they can be
  std::vector<SliceRecord> layout;
};

/// Throws UsageError for a run outside of its parameter, two slices of one run, undefined tensors.
SliceFile slice_file(const std::vector<StateSlice>& slices);

std::string slice_file_name(int rank, int world_size);

}  // namespace tessera::store
