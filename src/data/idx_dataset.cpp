#include "tessera/data/idx_dataset.h"

#include <algorithm>
#include <cstring>

#include <torch/types.h>

#include "data/mapped_file.h"
#include "data/sample_numbers.h"
#include "data/shape_text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr uint8_t kUnsignedBytes = 0x08;

[[noreturn]] void refuse_idx(const std::string& path, const std::string& reason) {
  throw UsageError("IdxDataset: " + path + ": " + reason);
}

struct IdxFile {
  std::vector<int64_t> shape;
  std::shared_ptr<const uint8_t> values;
};

void require_magic(const std::string& path, const MappedFile& file, int least, int most) {
  const uint8_t* bytes = file.data.get();
  if (file.size == 0) refuse_idx(path, "is empty");
  if (file.size >= 2 && bytes[0] == 0x1f && bytes[1] == 0x8b)
    refuse_idx(path, "is compressed by gzip, expected the unpacked file");
  if (file.size < 4)
    refuse_idx(path, "has " + std::to_string(file.size) + " bytes, fewer than an IDX header");
  if (bytes[0] != 0 || bytes[1] != 0)
    refuse_idx(path, "is not an IDX file: it does not begin with two zero bytes");
  if (bytes[2] != kUnsignedBytes) {
    refuse_idx(path, "holds values of IDX type " + std::to_string(bytes[2]) +
                         ", expected 8 (unsigned bytes)");
  }
  if (bytes[3] < least || bytes[3] > most) {
    refuse_idx(path, "has " + std::to_string(bytes[3]) + " dimensions, expected " +
                         std::to_string(least) +
                         (most > least ? " or " + std::to_string(most) : std::string()));
  }
}

IdxFile open_idx(const std::string& path, int least, int most) {
  const MappedFile file = map_file("IdxDataset", path);
  require_magic(path, file, least, most);
  const int64_t dimensions = file.data.get()[3], header = 4 + 4 * dimensions;
  if (file.size < header) {
    refuse_idx(path, "has " + std::to_string(file.size) + " bytes, its header alone " +
                         std::to_string(header));
  }
  IdxFile idx;
  int64_t values = 1;
  bool fits = true;
  for (int64_t d = 0; d < dimensions; ++d) {
    const uint8_t* at = file.data.get() + 4 + 4 * d;
    idx.shape.push_back(int64_t{at[0]} << 24 | int64_t{at[1]} << 16 | int64_t{at[2]} << 8 |
                        int64_t{at[3]});
    fits = fits && !__builtin_mul_overflow(values, idx.shape.back(), &values);
  }
  if (std::count(idx.shape.begin(), idx.shape.end(), 0) > 0)
    refuse_idx(path, "holds nothing: its header says " + shape_text(idx.shape));
  if (!fits || values != file.size - header) {
    refuse_idx(path, "the header says " + shape_text(idx.shape) + " bytes; " +
                         std::to_string(file.size - header) + " follow it");
  }
  idx.values = std::shared_ptr<const uint8_t>(file.data, file.data.get() + header);
  return idx;
}

}  // namespace

IdxDataset::IdxDataset(const IdxOptions& options) : options_(options) {
  const IdxFile images = open_idx(options_.images, 3, 4), labels = open_idx(options_.labels, 1, 1);
  count_ = images.shape[0];
  if (labels.shape[0] != count_) {
    refuse_idx(options_.labels, std::to_string(labels.shape[0]) + " labels for the " +
                                    std::to_string(count_) + " images of " + options_.images);
  }
  width_ = images.shape.back();
  height_ = images.shape[images.shape.size() - 2];
  channels_ = images.shape.size() == 4 ? images.shape[1] : 1;
  images_ = images.values;
  labels_ = labels.values;
  classes_ = *std::max_element(labels_.get(), labels_.get() + count_) + int64_t{1};
  check_mapped(labels_.get());
  if (options_.classes > 0 && classes_ > options_.classes) {
    const uint8_t* found = std::find_if(labels_.get(), labels_.get() + count_,
                                        [&](uint8_t label) { return label >= options_.classes; });
    refuse_idx(options_.labels, "label " + std::to_string(*found) + " at position " +
                                    std::to_string(found - labels_.get()) +
                                    " is not below the number of classes, " +
                                    std::to_string(options_.classes));
  }
}

Batch IdxDataset::get(const std::vector<int64_t>& samples) const {
  const std::vector<int64_t> rows = rows_of_samples("IdxDataset", samples, count_);
  const auto count = static_cast<int64_t>(rows.size());
  Batch batch{at::empty({count, channels_, height_, width_}, at::kFloat),
              at::empty({count}, at::kLong)};
  float* input = batch.inputs.data_ptr<float>();
  int64_t* target = batch.targets.data_ptr<int64_t>();
  const int64_t pixels = channels_ * height_ * width_;
  for (const int64_t row : rows) {
    const uint8_t* image = images_.get() + row * pixels;
    input = std::transform(image, image + pixels, input,
                           [](uint8_t value) { return static_cast<float>(value) / 255; });
    *target++ = labels_.get()[row];
  }
  check_mapped(images_.get());
  check_mapped(labels_.get());
  return batch;
}

std::string IdxDataset::describe() const {
  return "IdxDataset: " + options_.images + ": " + std::to_string(count_) + " images of " +
         shape_text({channels_, height_, width_}) + ", " + std::to_string(classes_) + " classes";
}

}  // namespace tessera
