#pragma once

#include <string>
#include <string_view>

#include "checkpoint/io/safetensors_header.h"

namespace tessera::safetensors {

/// Parses the JSON of a header and checks its grammar, keys and types. Duplicate keys are errors.
/// The caller checks the values of the numbers. Throws UsageError with `file` and the tensor.
Header parse_header_json(const std::string& file, std::string_view text);

}  // namespace tessera::safetensors
