#pragma once

#include <map>
#include <string>
#include <vector>

#include "tessera/checkpoint_store.h"
#include "tessera/safetensors_weights.h"
#include "tessera/weights/tensor_source.h"

namespace tessera::train {

/// The file with the weights of a checkpoint that has one file of them.
inline constexpr const char* kCheckpointWeights = "weights.safetensors";

/// The weights of a checkpoint, opened for reading. Every member, and the constructor, may read
/// files of other hosts, so they are called within Checkpoint::read_together(). `load` compares
/// digests; `load_slice` does where the slice is the whole tensor.
class CheckpointWeights : public TensorSource {
 public:
  /// Opens the file, or the files of the index, and checks that the index fits them. `checkpoint`
  /// must outlive this object.
  explicit CheckpointWeights(const Checkpoint& checkpoint);

  const std::string& path() const override { return path_; }
  const std::vector<SafetensorsEntry>& entries() const override { return entries_; }
  bool contains(const std::string& name) const override { return index_.files.count(name) > 0; }
  const SafetensorsEntry& info(const std::string& name) const override;
  at::ScalarType scalar_type(const std::string& name) const override;
  at::Tensor load(const std::string& name) const override;
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const override;

 private:
  const std::string& file_of(const std::string& name) const;

  const Checkpoint& checkpoint_;
  std::string path_;
  WeightsIndex index_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace tessera::train
