#include "checkpoint/store/slice_file.h"

#include <set>
#include <tuple>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "sharding/bucket.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

bool follows(const at::Tensor& tensor, const StateSlice& slice) {
  if (tensor.dim() == 0 || tensor.numel() != slice.numel) return false;
  return tensor.dim() == 1 || tensor.sizes() == at::IntArrayRef(slice.shape);
}

}  // namespace

SliceFile slice_file(const std::vector<StateSlice>& slices) {
  SliceFile file;
  std::set<std::tuple<std::string, int64_t, int64_t>> runs;
  for (const StateSlice& slice : slices) {
    const std::string where =
        "checkpoint: optimizer state of " + safetensors::in_quotes(slice.parameter) + ": ";
    try {
      check_run(slice.shape, slice.begin, slice.numel);
    } catch (const UsageError& error) {
      throw UsageError(where + error.what());
    }
    if (!runs.emplace(slice.parameter, slice.begin, slice.numel).second) {
      throw UsageError(
          fmt::format("{}elements [{}, +{}) are given twice", where, slice.begin, slice.numel));
    }
    SliceRecord record{slice.parameter,    slice.shape, slice.begin, slice.numel, {}, {},
                       slice.state.scalars};
    for (const auto& [name, tensor] : slice.state.tensors) {
      if (!tensor.defined()) throw UsageError(where + name + " is undefined");
      const bool cut = follows(tensor, slice);
      (cut ? record.following : record.whole).push_back(name);
      file.tensors.emplace_back(record.tensor_name(name),
                                cut ? sharding::in_memory_order(tensor.detach()) : tensor.detach());
    }
    file.layout.push_back(std::move(record));
  }
  return file;
}

std::string slice_file_name(int rank, int world_size) {
  return fmt::format("optimizer-{:05d}-of-{:05d}.safetensors", rank, world_size);
}

}  // namespace tessera::store
