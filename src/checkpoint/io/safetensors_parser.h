#pragma once

#include <string>
#include <string_view>

#include "checkpoint/io/safetensors_header.h"

namespace tessera::safetensors {

/// The JSON of a header: its grammar, keys and types, duplicates refused. What the numbers mean is
/// checked by the caller. Throws UsageError naming `file` and the tensor.
Header parse_header_json(const std::string& file, std::string_view text);

}  // namespace tessera::safetensors
