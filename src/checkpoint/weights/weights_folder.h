#pragma once

#include <string>
#include <vector>

#include "tessera/safetensors_weights.h"

// [Note: what a folder of weights holds] Hugging Face's libraries prefer model.safetensors to an
// index, and so does Tessera. So a folder has the files of one save only: a save
// removes the index and model.safetensors before its parts get their names, and the parts of former
// saves after its own index is there.

namespace tessera {

/// Before the parts get their names. Throws Error if a file cannot be removed.
void begin_weights_folder(const std::string& folder);
/// When all parts have their names: writes the index in one step, and removes the parts of former
/// saves. Throws Error if it cannot.
void finish_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts,
                           const std::string& index_text);

}  // namespace tessera
