#pragma once

#include <string>

#include "tessera/optim/optimizer_state_dict.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Writes `dict` to a safetensors file, atomically as SafetensorsWriter does. Tensors have the name
/// "parameter/key"; groups, options and scalars are JSON text in the metadata. Doubles keep all
/// their bits. Local: call it on the rank that has the state dict. Throws UsageError for names that
/// are not UTF-8 or not unique, Error if writing fails.
void save_optimizer_state(const OptimizerStateDict& dict, const std::string& path);

/// Reads what save_optimizer_state() has written, with the same bits, on the CPU. Throws UsageError
/// with the path for a damaged file, and for one that has no optimizer state. Local.
OptimizerStateDict load_optimizer_state(const std::string& path);

}  // namespace tessera
#pragma GCC visibility pop
