#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/safetensors.h"

// Weights as one safetensors file, or as several with Hugging Face's index, a JSON text:
//   {"metadata": {"total_size": BYTES}, "weight_map": {"NAME": "model-00001-of-00004.safetensors"}}
// Every tensor is whole in one of the files. All functions are local.

namespace tessera {

inline constexpr const char* kWeightsIndexName = "model.safetensors.index.json";
inline constexpr const char* kWeightsIndexSuffix = ".index.json";

/// The contents of an index.
struct WeightsIndex {
  std::map<std::string, std::string> files;  ///< by tensor: the name of its file
  std::optional<uint64_t> total_size;        ///< bytes of all tensors, if stated

  /// The files, each once, in order of their names.
  std::vector<std::string> file_names() const;
  /// Throws UsageError unless the files have exactly the tensors that the index gives them, and the
  /// total is right. `entries`: the tensors of each file. `path`: the index, for messages.
  void check(const std::string& path,
             const std::map<std::string, const std::vector<SafetensorsEntry>*>& entries) const;
};

/// Parses the text of an index. `path`: its name, for messages. Throws UsageError for other JSON,
/// tensors that are named twice, and file names that are not plain names ending in ".safetensors"
/// (such as "../x.safetensors").
WeightsIndex parse_weights_index(const std::string& path, const std::string& text);

/// Weights opened for reading. The headers of all files are read and checked; only `load` and
/// `load_slice` read data. Several threads may call them at the same time.
class SafetensorsWeights {
 public:
  /// `path`: a safetensors file, an index (its name ends in ".index.json"), or a folder that has
  /// model.safetensors.index.json, model.safetensors or weights.safetensors; the first of them is
  /// read. Throws UsageError as SafetensorsFile and parse_weights_index() do, and if a file of the
  /// index is missing, has not exactly the tensors that the index gives it, or the total is wrong.
  explicit SafetensorsWeights(const std::string& path);
  ~SafetensorsWeights();
  SafetensorsWeights(SafetensorsWeights&&) noexcept;
  SafetensorsWeights& operator=(SafetensorsWeights&&) noexcept;

  /// The file or the index that is read.
  const std::string& path() const;
  /// Every tensor, file by file, in the order of the data. Offsets are those within its file.
  const std::vector<SafetensorsEntry>& entries() const;
  bool contains(const std::string& name) const;
  /// As the functions of SafetensorsFile.
  const SafetensorsEntry& info(const std::string& name) const;
  at::ScalarType scalar_type(const std::string& name) const;
  at::Tensor load(const std::string& name) const;
  void load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                  at::Tensor out) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The tensors of one file of weights, and thereby of the rank that writes it.
struct WeightsPart {
  std::string file;             ///< "model-00001-of-00004.safetensors"
  std::vector<size_t> tensors;  ///< their numbers, ascending
  uint64_t bytes = 0;           ///< of the tensors
};

/// Divides whole tensors over at most `ranks` files, one for each rank from rank 0 on: the largest
/// first, each to the rank with the fewest bytes so far. The tensors from number `rank0_from` on go
/// to rank 0 before all others. No rank gets more bytes than total / ranks + the largest tensor,
/// unless those of rank 0 alone are more. With fewer tensors than ranks the last ranks get no file.
std::vector<WeightsPart> divide_weights(const std::vector<SafetensorsSpec>& tensors, int ranks,
                                        size_t rank0_from = std::numeric_limits<size_t>::max());

/// The text of the index of these parts. Throws UsageError for names that are not UTF-8.
std::string weights_index_text(const std::vector<SafetensorsSpec>& tensors,
                               const std::vector<WeightsPart>& parts);

}  // namespace tessera
