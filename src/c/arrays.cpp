#include "c/arrays.h"

#include <iterator>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera::c {
namespace {

constexpr int32_t kMostDims = 8;
constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kInt, at::kLong, at::kByte};

}  // namespace

at::Tensor tensor_of(const tessera_array& array, const std::string& where) {
  const auto refuse = [&](const std::string& what) { throw UsageError(where + ": " + what); };
  if (array.dtype < 0 || array.dtype >= static_cast<int32_t>(std::size(kTypes)))
    refuse(fmt::format("dtype {}; expected TESSERA_FLOAT32 (0) to TESSERA_UINT8 (4)", array.dtype));
  if (array.dims < 1 || array.dims > kMostDims)
    refuse(fmt::format("dims {}; expected 1 to {}", array.dims, kMostDims));
  if (array.shape == nullptr) refuse("shape is NULL; expected the extents");
  const at::IntArrayRef shape(array.shape, static_cast<size_t>(array.dims));
  std::vector<int64_t> strides(shape.size(), 1);
  int64_t elements = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] < 0) refuse(fmt::format("an extent is {}; expected >= 0", shape[d]));
    strides[d] = array.strides != nullptr ? array.strides[d] : elements;
    if (strides[d] < 0) refuse(fmt::format("a stride is {} elements; expected >= 0", strides[d]));
    elements *= shape[d];
  }
  const auto options = at::TensorOptions(kTypes[array.dtype]);
  if (elements == 0) return at::empty(shape, options);
  if (array.data == nullptr)
    refuse(fmt::format("data is NULL and the shape [{}]; expected values", fmt::join(shape, ", ")));
  return at::from_blob(array.data, shape, strides, options);
}

at::Tensor tensor_of(const tessera_array* array, const std::string& where) {
  return array != nullptr ? tensor_of(*array, where) : at::Tensor();
}

void copy_to(const tessera_array& array, const at::Tensor& values, const std::string& where) {
  const at::Tensor to = tensor_of(array, where);
  if (to.sizes() != values.sizes())
    throw UsageError(fmt::format("{}: the array has shape [{}]; expected [{}]", where,
                                 fmt::join(to.sizes(), ", "), fmt::join(values.sizes(), ", ")));
  to.copy_(values);
}

}  // namespace tessera::c
