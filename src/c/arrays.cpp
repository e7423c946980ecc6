#include "c/arrays.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera::c {
namespace {

constexpr int32_t kMostDims = 8;
constexpr int64_t kMostElements = int64_t{1} << 56;
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kInt, at::kLong, at::kByte};

/// Whether the elements have places of their own: each stride passes all elements of the smaller
/// ones.
bool are_apart(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride and extent
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  std::sort(dims.begin(), dims.end());
  int64_t last = 0;
  return std::all_of(dims.begin(), dims.end(), [&](const auto& dim) {
    const bool apart = dim.first > last;
    last += (dim.second - 1) * dim.first;
    return apart;
  });
}

}  // namespace

at::Tensor tensor_of(const tessera_array& array, const std::string& where, bool written) {
  const auto refuse = [&](const std::string& what) { throw UsageError(where + ": " + what); };
  if (array.dtype < 0 || array.dtype >= static_cast<int32_t>(std::size(kTypes)))
    refuse(fmt::format("dtype {}; expected TESSERA_FLOAT32 (0) to TESSERA_UINT8 (4)", array.dtype));
  if (array.dims < 1 || array.dims > kMostDims)
    refuse(fmt::format("dims {}; expected 1 to {}", array.dims, kMostDims));
  if (array.shape == nullptr) refuse("shape is NULL; expected the extents");
  const at::IntArrayRef shape(array.shape, static_cast<size_t>(array.dims));
  std::vector<int64_t> strides(shape.size(), 1);
  int64_t elements = 1, last = 0, offset = 0;  // `last`: the element that is farthest away
  bool fits = true;
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] < 0) refuse(fmt::format("an extent is {}; expected >= 0", shape[d]));
    strides[d] = array.strides != nullptr ? array.strides[d] : fits ? elements : 0;
    if (strides[d] < 0) refuse(fmt::format("a stride is {} elements; expected >= 0", strides[d]));
    fits = fits && !__builtin_mul_overflow(elements, shape[d], &elements) &&
           !__builtin_mul_overflow(shape[d] - 1, strides[d], &offset) &&
           !__builtin_add_overflow(last, offset, &last);
  }
  const auto options = at::TensorOptions(kTypes[array.dtype]);
  if (empty) return at::empty(shape, options);
  if (!fits || std::max(elements, last) > kMostElements)
    refuse(fmt::format("shape [{}] and strides [{}] are more than memory can have",
                       fmt::join(shape, ", "), fmt::join(strides, ", ")));
  if (array.data == nullptr)
    refuse(fmt::format("data is NULL and the shape [{}]; expected values", fmt::join(shape, ", ")));
  const at::Tensor tensor = at::from_blob(array.data, shape, strides, options);
  if (written && !are_apart(tensor))
    refuse(
        fmt::format("elements of the shape [{}] share memory by the strides [{}]; expected a "
                    "place for each",
                    fmt::join(shape, ", "), fmt::join(strides, ", ")));
  return tensor;
}

at::Tensor tensor_of(const tessera_array* array, const std::string& where) {
  return array != nullptr ? tensor_of(*array, where) : at::Tensor();
}

void copy_to(const tessera_array& array, const at::Tensor& values, const std::string& where) {
  const at::Tensor to = tensor_of(array, where, true);
  if (to.sizes() != values.sizes())
    throw UsageError(fmt::format("{}: the array has shape [{}]; expected [{}]", where,
                                 fmt::join(to.sizes(), ", "), fmt::join(values.sizes(), ", ")));
  to.copy_(values);
}

}  // namespace tessera::c
