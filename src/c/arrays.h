#pragma once

#include <string>

#include <torch/types.h>

#include "tessera/c.h"

namespace tessera::c {

/// A tensor in the caller's memory. UsageError, which begins with `where`, for a dtype, a number of
/// dimensions, an extent or a stride that is impossible, and, if it is to be `written`, for strides
/// by which elements share memory. Local.
at::Tensor tensor_of(const tessera_array& array, const std::string& where, bool written = false);
/// The same; undefined for null.
at::Tensor tensor_of(const tessera_array* array, const std::string& where);

/// Copies `values` into the caller's array. UsageError unless it has their shape. Local.
void copy_to(const tessera_array& array, const at::Tensor& values, const std::string& where);

}  // namespace tessera::c
