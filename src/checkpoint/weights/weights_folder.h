#pragma once

#include <string>
#include <vector>

#include "tessera/safetensors_weights.h"

// [Note: what a folder of weights holds] Hugging Face's libraries prefer model.safetensors to an
// index, and so does Tessera. So a folder has the files of one save only: a save
// removes the index and model.safetensors before its parts get their names, and the parts of former
// saves after its own index is there.

namespace tessera {

/// Makes the folder. Returns what the names of `parts` need, so that no file of a former save has
/// them: "", or a tag for name_parts(). UsageError if it cannot.
std::string make_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts);
inline void name_parts(std::vector<WeightsPart>& parts, const std::string& tag) {
  for (auto& part : parts) part.file.insert(std::string("model").size(), tag);
}
/// When all parts have their names: writes the index in one step, and removes the files of former
/// saves. Throws Error if it cannot.
void finish_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts,
                           const std::string& index_text);

}  // namespace tessera
