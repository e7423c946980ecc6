#pragma once

#include <string>

#include <torch/types.h>

#include "tessera/c.h"

namespace tessera::c {

/// A tensor in the caller's memory. UsageError, which begins with `where`, for a dtype, a number of
/// dimensions, an extent or a stride that is impossible. Local.
at::Tensor tensor_of(const tessera_array& array, const std::string& where);
/// The same; undefined for null.
at::Tensor tensor_of(const tessera_array* array, const std::string& where);

/// Copies `values` into the caller's array. UsageError unless it has their shape. Local.
void copy_to(const tessera_array& array, const at::Tensor& values, const std::string& where);

}  // namespace tessera::c
