#include "checkpoint/store/slice_file.h"

#include <set>
#include <tuple>

#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "sharding/bucket.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

bool follows(const at::Tensor& tensor, const StateSlice& slice) {
  if (tensor.dim() == 0 || tensor.numel() != slice.numel) return false;
  return tensor.dim() == 1 || tensor.sizes() == at::IntArrayRef(slice.shape);
}

/// The elements of `tensor`, which follows the parameter, in the slice's memory order.
at::Tensor run_of(const at::Tensor& tensor, const StateSlice& slice) {
  if (tensor.dim() == 1 || slice.strides.empty()) return sharding::in_memory_order(tensor);
  return sharding::in_memory_order(tensor, sharding::order_of(slice));
}

}  // namespace

std::string slices_text(const std::string& set, const std::string& parameter) {
  return set + " slices of " + safetensors::in_quotes(parameter);
}

SliceFile slice_file(const std::string& set, const std::vector<StateSlice>& slices) {
  SliceFile file;
  std::set<std::tuple<std::string, int64_t, int64_t>> ranges;
  for (const StateSlice& slice : slices) {
    const std::string where = "checkpoint: " + slices_text(set, slice.parameter) + ": ";
    named(where, [&] { check_range(slice); });
    if (!ranges.emplace(slice.parameter, slice.begin, slice.numel).second) {
      throw UsageError(
          fmt::format("{}elements [{}, +{}) are given twice", where, slice.begin, slice.numel));
    }
    SliceRecord record{slice, {}, {}, slice.state.scalars};
    for (const auto& [name, tensor] : slice.state.tensors) {
      if (!tensor.defined()) throw UsageError(where + name + " is undefined");
      const bool cut = follows(tensor, slice);
      (cut ? record.following : record.whole).push_back(name);
      file.tensors.emplace_back(record.tensor_name(name),
                                cut ? run_of(tensor.detach(), slice) : tensor.detach());
    }
    file.layout.push_back(std::move(record));
  }
  return file;
}

std::string slice_file_name(const std::string& set, int rank, int world_size) {
  return fmt::format("{}-{:05d}-of-{:05d}.safetensors", set, rank, world_size);
}

}  // namespace tessera::store
