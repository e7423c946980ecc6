#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/data/dataset.h"

namespace tessera {

/// Arrays in NumPy's .npy files (NEP 1; versions 1 to 3): C order, little-endian, of type f2, f4,
/// f8, i1, i2, i4, i8, u1 or bool. Dimension 0 counts the samples.
struct NpyOptions {
  std::string inputs;
  std::string targets;
};

/// One array, mapped, not read: do not shorten a file in use.
struct NpyArray {
  enum class Type { f2, f4, f8, i1, i2, i4, i8, u1, boolean };

  std::string path;
  Type type = Type::f4;
  std::vector<int64_t> shape;           ///< one dimension or more, none of them 0
  std::shared_ptr<const uint8_t> data;  ///< the first value, at any alignment

  /// Throws UsageError naming the file and what is wrong: missing, empty, no .npy file, a version,
  /// header, type, order or shape that is not as above, shorter or longer than its shape says.
  /// Nothing is allocated for what a header claims.
  static NpyArray open(const std::string& path);
  int64_t row_values() const;
  /// Rows `rows` (each within [0, shape[0])), converted: [rows, shape[1], …]; `to` is kFloat or
  /// kLong.
  at::Tensor gather(const std::vector<int64_t>& rows, at::ScalarType to) const;
};

/// inputs float32 [B, …]; targets int64 [B, …] of integers and bools, float32 [B, …] of floats.
class NpyDataset : public Dataset {
 public:
  /// Throws UsageError as NpyArray::open, and when the numbers of samples differ.
  explicit NpyDataset(const NpyOptions& options);

  int64_t size() const override { return inputs_.shape[0]; }
  Batch get(const std::vector<int64_t>& samples) const override;
  std::string describe() const override;

  const NpyArray& inputs() const { return inputs_; }
  const NpyArray& targets() const { return targets_; }

 private:
  NpyArray inputs_, targets_;
};

}  // namespace tessera
