#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <torch/types.h>

namespace tessera::safetensors {

/// The libtorch type of a dtype of the format; nullopt if this libtorch has no such type.
std::optional<at::ScalarType> scalar_type(std::string_view dtype);

/// The format's name of a libtorch type. Throws UsageError with `file` and the tensor for a type
/// that the format does not have.
std::string dtype_name(const std::string& file, const std::string& tensor, at::ScalarType type);

}  // namespace tessera::safetensors
