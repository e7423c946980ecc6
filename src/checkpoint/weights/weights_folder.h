#pragma once

#include <string>
#include <vector>

#include "tessera/safetensors_weights.h"

// [Note: files of a folder of weights] Hugging Face's libraries prefer model.safetensors to an
// index; Tessera does the same. A save gives its parts names that no file has, replaces the index
// in one step, removes model.safetensors, and then the parts of former saves. So a reader finds the
// whole former save or the whole new one at every moment: model.safetensors of the former save
// while it exists, otherwise the files of the index.

namespace tessera {

/// Makes the folder. Returns a tag for name_parts() if a file of a former save has the name of one
/// of `parts`, else "". UsageError if it cannot.
std::string make_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts);
inline std::string with_tag(std::string file, const std::string& tag) {
  return file.insert(std::string("model").size(), tag);
}
inline void name_parts(std::vector<WeightsPart>& parts, const std::string& tag) {
  for (auto& part : parts) part.file = with_tag(part.file, tag);
}
/// When all parts have their names: writes the index in one step, and removes the files of former
/// saves. Throws Error if it cannot.
void finish_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts,
                           const std::string& index_text);

}  // namespace tessera
