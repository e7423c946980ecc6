#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

namespace tessera::sharding {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// "weight float32 [3, 4] trainable": one line of a contract between ranks.
std::string signature(const NamedTensor& parameter);
std::vector<std::string> signatures(const std::vector<NamedTensor>& parameters);

/// Refuses undefined, sparse and repeated tensors, and trainable ones whose gradients have no sum
/// here (complex): UsageError "<component>: group G, parameter I (name): …".
void check_parameters(const std::string& component, const std::vector<NamedTensor>& parameters,
                      size_t group, int rank);

/// Refuses a gradient that is not dense.
void check_gradient(const std::string& component, const std::string& parameter,
                    const at::Tensor& gradient, int rank);

/// Tensors that can share one flat buffer: same dtype and device. Indices into `parameters`,
/// classes by first appearance.
std::vector<std::vector<size_t>> by_dtype_and_device(const std::vector<NamedTensor>& parameters,
                                                     const std::vector<size_t>& subset);

}  // namespace tessera::sharding
