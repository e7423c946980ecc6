#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// An array in NumPy's .npy format (NEP 1, versions 1 to 3): C order, little-endian, of type f2,
/// f4, f8, i1, i2, i4, i8, u1 or bool. The file is memory-mapped. If it is shortened while the
/// array is alive, gather() throws Error with its name; reads through `data` then give zeros.
struct NpyArray {
  enum class Type { f2, f4, f8, i1, i2, i4, i8, u1, boolean };

  std::string path;
  Type type = Type::f4;
  std::vector<int64_t> shape;           ///< At least one dimension; no dimension is 0.
  std::shared_ptr<const uint8_t> data;  ///< The first value, at any alignment.

  /// Throws UsageError naming the file and the fault: it is missing, empty or not a .npy file; its
  /// version, header, type, order or shape is not as above; or its length does not match its shape.
  /// The sizes in a header are checked against the file's length before any memory is allocated.
  static NpyArray open(const std::string& path);
  /// Values in one row: the product of all dimensions but the first.
  int64_t row_values() const;
  /// The rows with these numbers, each in [0, shape[0]), converted: [rows, shape[1], …]. `to` is
  /// kFloat or kLong.
  at::Tensor gather(const std::vector<int64_t>& rows, at::ScalarType to) const;
};

}  // namespace tessera
#pragma GCC visibility pop
