#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/data/dataset.h"

namespace tessera {

/// Images and labels in IDX files, MNIST's format (LeCun, Cortes, Burges): two zero bytes, the type
/// (0x08: unsigned bytes), the number of dimensions, each dimension as a big-endian 32-bit number,
/// then the values.
struct IdxOptions {
  std::string images;   ///< …-images-idx3-ubyte: [N, H, W], or idx4: [N, C, H, W]
  std::string labels;   ///< …-labels-idx1-ubyte: [N]
  int64_t classes = 0;  ///< of the model; 0: do not check
};

/// inputs float32 [B, C, H, W] in [0, 1] (C is 1 for idx3), targets int64 [B]. Files are mapped,
/// not read: do not shorten a file in use.
class IdxDataset : public Dataset {
 public:
  /// Throws UsageError naming the file: missing, empty, compressed, another magic number, type or
  /// number of dimensions, sizes that do not make the file's length, unequal counts, a label ≥
  /// classes with its position.
  explicit IdxDataset(const IdxOptions& options);

  int64_t size() const override { return count_; }
  Batch get(const std::vector<int64_t>& samples) const override;
  std::string describe() const override;

  int64_t channels() const { return channels_; }
  int64_t height() const { return height_; }
  int64_t width() const { return width_; }
  /// The largest label plus one.
  int64_t classes() const { return classes_; }

 private:
  IdxOptions options_;
  std::shared_ptr<const uint8_t> images_,
      labels_;  // the first value of each, inside the mapped file
  int64_t count_ = 0, channels_ = 1, height_ = 0, width_ = 0, classes_ = 0;
};

}  // namespace tessera
