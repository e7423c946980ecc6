#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <torch/types.h>

#include "tessera/safetensors.h"

// Weights as one safetensors file, or as several with Hugging Face's index, a JSON text:
//   {"metadata": {"total_size": BYTES}, "weight_map": {"NAME": "model-00001-of-00004.safetensors"}}
// Every tensor is whole in one of the files. All functions are local.

#pragma GCC visibility push(default)
namespace tessera {

inline constexpr const char* kWeightsIndexName = "model.safetensors.index.json";
inline constexpr const char* kWeightsIndexSuffix = ".index.json";

/// The contents of an index.
struct WeightsIndex {
  std::map<std::string, std::string> files;  ///< by tensor: the name of its file
  std::optional<uint64_t> total_size;        ///< bytes of all tensors, if stated as a number

  /// The files, each once, in order of their names.
  std::vector<std::string> file_names() const;
  /// Throws UsageError unless the files have the tensors that the index gives them. Returns the
  /// other differences, for the log: tensors that the index gives to another file or to none, and a
  /// wrong total. `entries`: the tensors of each file. `path`: the index, for messages.
  std::vector<std::string> check(
      const std::string& path,
      const std::map<std::string, const std::vector<SafetensorsEntry>*>& entries) const;
};

/// Parses the text of an index. `path`: its name, for messages. Throws UsageError for other JSON,
/// tensors that are named twice, and file names that are not plain names ending in ".safetensors"
/// or ".bin" (such as "../x.safetensors").
WeightsIndex parse_weights_index(const std::string& path, const std::string& text);

/// The tensors of one file of weights.
struct WeightsPart {
  int rank = 0;                      ///< that writes it
  std::string file = {};             ///< "model-00001-of-00004.safetensors"
  std::vector<size_t> tensors = {};  ///< their numbers, ascending
  uint64_t bytes = 0;                ///< of the tensors
};

/// Divides whole tensors over at most `ranks` files, one for each rank from rank 0 on: the largest
/// first, each to the rank with the fewest bytes so far. The tensors from number `rank0_from` on
/// are given to rank 0 first. No rank gets more bytes than total / ranks + the largest tensor,
/// unless these tensors of rank 0 are more. With fewer tensors than ranks the last ranks get no
/// file. A rank whose tensors have more than `max_bytes` writes several files, each of at most that
/// many bytes or of one tensor; files are in order of ranks.
std::vector<WeightsPart> divide_weights(const std::vector<SafetensorsSpec>& tensors, int ranks,
                                        size_t rank0_from = std::numeric_limits<size_t>::max(),
                                        uint64_t max_bytes = std::numeric_limits<uint64_t>::max());

/// The text of the index of these parts. Throws UsageError for names that are not UTF-8.
std::string weights_index_text(const std::vector<SafetensorsSpec>& tensors,
                               const std::vector<WeightsPart>& parts);

}  // namespace tessera
#pragma GCC visibility pop
