#pragma once

#include <ATen/ATen.h>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// `tensor`, or a copy of it if it is a conjugate or negative view: the values of the result are in
/// its memory. For code that takes data_ptr().
inline at::Tensor resolved(const at::Tensor& tensor) { return tensor.resolve_conj().resolve_neg(); }

/// True if memory and values are the same.
inline bool is_resolved(const at::Tensor& tensor) { return !tensor.is_conj() && !tensor.is_neg(); }

}  // namespace tessera::detail
#pragma GCC visibility pop
