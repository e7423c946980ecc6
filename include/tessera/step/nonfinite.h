#pragma once

#include <string>

#include <torch/types.h>

#pragma GCC visibility push(default)
namespace tessera {

/// Counts the elements of `tensor` that are NaN or infinite: "NaN in 3 of 4096 elements", "infinity
/// in 1 of 8 elements", "NaN in 3 and infinity in 1 of 4096 elements". "" if all are finite, and
/// for tensors that are undefined, empty, not strided or of whole numbers. One pass where all are
/// finite; waits for the tensor's device. Local.
std::string nonfinite_text(const at::Tensor& tensor);

/// True if `tensor` consists of zeros and negative infinities alone, as attention masks do. Local.
bool is_mask(const at::Tensor& tensor);

}  // namespace tessera
#pragma GCC visibility pop
