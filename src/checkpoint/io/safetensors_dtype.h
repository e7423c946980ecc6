#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <torch/types.h>

namespace tessera::safetensors {

/// The libtorch type of a dtype of the format; none where this libtorch has no such type.
std::optional<at::ScalarType> scalar_type(std::string_view dtype);

/// The reverse. Throws UsageError, naming `file` and the tensor, for a type that the format lacks.
std::string dtype_name(const std::string& file, const std::string& tensor, at::ScalarType type);

}  // namespace tessera::safetensors
