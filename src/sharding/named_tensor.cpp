#include "sharding/named_tensor.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include "tessera/error.h"
#include "tessera/optim/state_slice.h"

namespace tessera::sharding {

std::string signature(const NamedTensor& parameter) {
  const auto& tensor = parameter.tensor;
  auto line = fmt::format("{} {} [{}] {}", parameter.name, c10::toString(tensor.scalar_type()),
                          fmt::join(tensor.sizes().begin(), tensor.sizes().end(), ", "),
                          tensor.requires_grad() ? "trainable" : "frozen");
  // Ranks exchange elements in memory order.
  if (tensor.layout() == at::kStrided && !tensor.is_contiguous())
    line += fmt::format(" strides [{}]", fmt::join(memory_strides(tensor), ", "));
  return line;
}

std::vector<std::string> signatures(const std::vector<NamedTensor>& parameters) {
  std::vector<std::string> result;
  for (const auto& parameter : parameters) result.push_back(signature(parameter));
  return result;
}

std::string first_to_last(const std::vector<NamedTensor>& parameters,
                          const std::vector<size_t>& members) {
  const auto& first = parameters[members.front()].name;
  if (members.size() == 1) return first;
  return first + " to " + parameters[members.back()].name;
}

void check_parameters(const std::string& component, const std::vector<NamedTensor>& parameters,
                      size_t group, int rank) {
  const auto fail = [&](size_t index, const std::string& problem) {
    throw UsageError(fmt::format("{}: rank {}: group {}, parameter {} ({}): {}", component, rank,
                                 group, index, parameters[index].name, problem));
  };
  if (parameters.empty())
    throw UsageError(fmt::format("{}: rank {}: group {} has no parameters; expected at least one",
                                 component, rank, group));
  refuse_inference(component, parameters, rank);
  std::unordered_map<const void*, size_t> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& tensor = parameters[i].tensor;
    if (!tensor.defined()) fail(i, "the tensor is undefined; expected a parameter");
    if (tensor.layout() != at::kStrided) fail(i, "the tensor is sparse; expected a dense one");
    if (!tensor.is_leaf())
      fail(i, "the tensor is not a leaf (it is the result of an operation); expected a parameter");
    const auto [first, added] = seen.emplace(tensor.unsafeGetTensorImpl(), i);
    if (!added)
      fail(i, fmt::format("the same tensor as parameter {} ({}); expected each once", first->second,
                          parameters[first->second].name));
  }
}

void refuse_inference(const std::string& component, const std::vector<NamedTensor>& parameters,
                      int rank) {
  std::string what = c10::InferenceMode::is_enabled() ? "it is constructed" : "";
  for (auto one = parameters.rbegin(); one != parameters.rend(); ++one)
    if (one->tensor.defined() && one->tensor.is_inference())
      what = "parameter " + one->name + " was made";
  if (what.empty()) return;
  throw UsageError(fmt::format(
      "{}: rank {}: {} in InferenceMode, where no gradients are recorded; expected the module and "
      "the {} to be constructed outside of it (evaluate with torch::NoGradGuard)",
      component, rank, what, component));
}

at::Tensor dense_gradient(const std::string& component, const std::string& parameter,
                          const at::Tensor& gradient, int rank) {
  if (gradient.layout() == at::kStrided) return gradient;
  static std::once_flag said;
  if (rank == 0) {
    std::call_once(said, [&] {
      spdlog::info(
          "tessera: {}: parameter {} has a sparse gradient; such gradients are made dense before "
          "they are reduced",
          component, parameter);
    });
  }
  return gradient.to_dense();
}

std::string thawed_text(const std::string& component, const std::string& parameter, int rank) {
  return fmt::format(
      "{}: rank {}: parameter {} requires a gradient, but was frozen at construction; expected a "
      "parameter that is trainable at construction (it may be frozen and unfrozen later), or a "
      "new wrapper",
      component, rank, parameter);
}

std::vector<std::vector<size_t>> by_dtype_and_device(const std::vector<NamedTensor>& parameters,
                                                     const std::vector<size_t>& subset) {
  std::vector<std::vector<size_t>> classes;
  for (const auto i : subset) {
    const auto alike = [&](const std::vector<size_t>& members) {
      const auto& first = parameters[members[0]].tensor;
      return first.scalar_type() == parameters[i].tensor.scalar_type() &&
             first.device() == parameters[i].tensor.device();
    };
    auto found = std::find_if(classes.begin(), classes.end(), alike);
    if (found == classes.end()) classes.push_back({i});
    else found->push_back(i);
  }
  return classes;
}

}  // namespace tessera::sharding
