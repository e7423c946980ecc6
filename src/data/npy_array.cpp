#include "tessera/data/npy_array.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <torch/types.h>

#include "data/mapped_file.h"
#include "data/npy_header.h"
#include "data/shape_text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little,
              "arrays are little-endian and used in place");

template <class From, class To>
void convert_run(const uint8_t* from, int64_t count, To* to) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof value), sizeof value);
    to[i] = static_cast<To>(value);
  }
}

/// As in NumPy, every byte except 0 is true.
template <class To>
void convert_flags(const uint8_t* from, int64_t count, To* to) {
  std::transform(from, from + count, to, [](uint8_t value) { return static_cast<To>(value != 0); });
}

template <class To>
auto converter(NpyArray::Type type) {
  static constexpr void (*kByType[])(const uint8_t*, int64_t, To*) = {
      convert_run<c10::Half, To>, convert_run<float, To>,   convert_run<double, To>,
      convert_run<int8_t, To>,    convert_run<int16_t, To>, convert_run<int32_t, To>,
      convert_run<int64_t, To>,   convert_run<uint8_t, To>, convert_flags<To>};
  return kByType[static_cast<size_t>(type)];
}

}  // namespace

NpyArray NpyArray::open(const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError("NpyDataset: " + path + ": " + reason);
  };
  const MappedFile file = map_file("NpyDataset", path);
  const NpyHeader header = parse_npy_header(
      path, {reinterpret_cast<const char*>(file.data.get()), static_cast<size_t>(file.size)});
  check_mapped(file.data.get());
  if (header.shape.empty()) refuse("is a single number, expected one dimension or more");
  if (std::count(header.shape.begin(), header.shape.end(), 0) > 0)
    refuse("holds nothing: its shape is " + shape_text(header.shape));
  int64_t bytes = width_of(header.type);
  bool fits = true;
  for (const int64_t size : header.shape)
    fits = fits && !__builtin_mul_overflow(bytes, size, &bytes);
  const int64_t given = file.size - header.data_begin;
  if (!fits || bytes != given) {
    refuse("its shape " + shape_text(header.shape) + " of type " + name_of(header.type) +
           " makes " + (fits ? std::to_string(bytes) : std::string("more than 2^63")) + " bytes; " +
           std::to_string(given) + " follow the header");
  }
  return {path, header.type, header.shape, {file.data, file.data.get() + header.data_begin}};
}

int64_t NpyArray::row_values() const {
  int64_t values = 1;
  for (size_t d = 1; d < shape.size(); ++d) values *= shape[d];
  return values;
}

at::Tensor NpyArray::gather(const std::vector<int64_t>& rows, at::ScalarType to) const {
  std::vector<int64_t> sizes = shape;
  sizes[0] = static_cast<int64_t>(rows.size());
  at::Tensor result = at::empty(sizes, to);
  const int64_t values = row_values(), bytes = values * width_of(type);
  const auto fill = [&](auto* out) {
    const auto convert = converter<std::remove_pointer_t<decltype(out)>>(type);
    for (const int64_t row : rows) {
      convert(data.get() + row * bytes, values, out);
      out += values;
    }
  };
  if (to == at::kLong) fill(result.data_ptr<int64_t>());
  else fill(result.data_ptr<float>());
  check_mapped(data.get());
  return result;
}

}  // namespace tessera
