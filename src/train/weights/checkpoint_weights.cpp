#include "train/weights/checkpoint_weights.h"

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/safetensors_weights.h"

namespace tessera::train {
namespace {

class CheckpointWeights : public TensorSource {
 public:
  /// Opens the file, or the files of the index, and checks that the index fits them.
  explicit CheckpointWeights(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {
    path_ = checkpoint.path() + "/" + kCheckpointWeights;
    if (checkpoint.contains(kWeightsIndexName)) {
      path_ = checkpoint.path() + "/" + kWeightsIndexName;
      index_ = parse_weights_index(path_, checkpoint.text(kWeightsIndexName));
    } else {
      for (const auto& name : checkpoint.tensors(kCheckpointWeights).names())
        index_.files[name] = kCheckpointWeights;
    }
    std::map<std::string, const std::vector<SafetensorsEntry>*> contents;
    for (const auto& file : index_.file_names()) {
      const auto& part = checkpoint.tensors(file).entries();
      contents.emplace(file, &part);
      entries_.insert(entries_.end(), part.begin(), part.end());
    }
    if (const auto notes = index_.check(path_, contents); !notes.empty())
      throw UsageError(path_ + ": " + notes[0]);  // Tessera wrote it
  }

  const std::string& path() const override { return path_; }
  const std::vector<SafetensorsEntry>& entries() const override { return entries_; }
  bool contains(const std::string& name) const override { return index_.files.count(name) > 0; }
  const SafetensorsEntry& info(const std::string& name) const override {
    return checkpoint_.tensors(file_of(name)).info(name);
  }
  at::ScalarType scalar_type(const std::string& name) const override {
    return checkpoint_.tensors(file_of(name)).scalar_type(name);
  }
  at::Tensor load(const std::string& name) const override {
    return checkpoint_.load_tensor(file_of(name), name);
  }
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const override {
    checkpoint_.load_slice(file_of(name), name, elem_begin, elem_count, std::move(out));
  }

 private:
  const std::string& file_of(const std::string& name) const {
    const auto found = index_.files.find(name);
    if (found != index_.files.end()) return found->second;
    std::vector<std::string> names;
    for (const auto& entry : entries_) names.push_back(entry.name);
    throw UsageError(path_ + ": no tensor \"" + name + "\"" + did_you_mean(name, names));
  }

  const Checkpoint& checkpoint_;
  std::string path_;
  WeightsIndex index_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace

std::unique_ptr<TensorSource> open_weights(const Checkpoint& checkpoint) {
  return std::make_unique<CheckpointWeights>(checkpoint);
}

}  // namespace tessera::train
