#pragma once

#include <string>
#include <vector>

#include <torch/types.h>

namespace tessera::sharding {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// A line of a contract between ranks: "weight float32 [3, 4] trainable", with the strides if the
/// tensor is not contiguous.
std::string signature(const NamedTensor& parameter);
std::vector<std::string> signatures(const std::vector<NamedTensor>& parameters);

/// "first to last" of the `members`, indices into `parameters`, in their order; "first" if there is
/// one. Describes a bucket in the tags of its collectives.
std::string first_to_last(const std::vector<NamedTensor>& parameters,
                          const std::vector<size_t>& members);

/// UsageError "<component>: group G, parameter I (name): …" for undefined, sparse and repeated
/// tensors.
void check_parameters(const std::string& component, const std::vector<NamedTensor>& parameters,
                      size_t group, int rank);

/// UsageError, naming the parameter, if it was made in InferenceMode or that mode is enabled now.
/// Part of check_parameters().
void refuse_inference(const std::string& component, const std::vector<NamedTensor>& parameters,
                      int rank);

/// The gradient itself if it is dense. A sparse gradient (of an embedding) is made dense. Rank 0
/// logs that once in a process.
at::Tensor dense_gradient(const std::string& component, const std::string& parameter,
                          const at::Tensor& gradient, int rank);

/// The message for a parameter whose gradient a wrapper would not reduce: it was frozen when the
/// wrapper was made, and is trainable now.
std::string thawed_text(const std::string& component, const std::string& parameter, int rank);

/// Groups `subset` into lists of tensors that can share one flat buffer, because they have the same
/// dtype and device. Indices into `parameters`; lists are ordered by their first tensor.
std::vector<std::vector<size_t>> by_dtype_and_device(const std::vector<NamedTensor>& parameters,
                                                     const std::vector<size_t>& subset);

}  // namespace tessera::sharding
