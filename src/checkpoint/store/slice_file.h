#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/optim/state_slice.h"

namespace tessera::store {

/// A rank's slices as the tensors of a file, and their layout. Tensors that follow the parameter
/// are one-dimensional, in memory order.
struct SliceFile {
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // aliases if possible, else copies
  std::vector<SliceRecord> layout;
};

/// The name of a parameter's slices in messages: `optimizer slices of "fc.weight"`.
std::string slices_text(const std::string& set, const std::string& parameter);

/// Throws UsageError for a range outside of its parameter, for two slices of the same range, and
/// for undefined tensors. `set`: the slice set, for messages.
SliceFile slice_file(const std::string& set, const std::vector<StateSlice>& slices);

/// `<set>-00001-of-00004.safetensors`.
std::string slice_file_name(const std::string& set, int rank, int world_size);

}  // namespace tessera::store
