#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tessera/data/dataset.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Images and labels in IDX files, the format of MNIST (LeCun, Cortes, Burges): two zero bytes, the
/// type (0x08: unsigned bytes), the number of dimensions, each dimension as a big-endian 32-bit
/// number, then the values.
struct IdxOptions {
  std::string images;   ///< Path of …-images-idx3-ubyte, [N, H, W], or idx4, [N, C, H, W].
  std::string labels;   ///< Path of …-labels-idx1-ubyte, [N].
  int64_t classes = 0;  ///< Classes of the model, checked against the labels. 0: no check.
};

/// Inputs are float32 [B, C, H, W] in [0, 1] (C is 1 for idx3), targets int64 [B]. The files are
/// memory-mapped. If one is shortened while the dataset is alive, get() throws Error with its name.
class IdxDataset : public Dataset {
 public:
  /// Throws UsageError naming the file if it is missing, empty or compressed by gzip; if its magic
  /// number, type or number of dimensions is not as above; if its length does not match its sizes;
  /// if the numbers of images and labels differ; or if a label is ≥ options.classes (the message
  /// gives its position).
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
  std::shared_ptr<const uint8_t> images_, labels_;  // the first value, inside the mapped file
  int64_t count_ = 0, channels_ = 1, height_ = 0, width_ = 0, classes_ = 0;
};

}  // namespace tessera
#pragma GCC visibility pop
