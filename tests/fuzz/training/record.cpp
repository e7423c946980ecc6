#include "fuzz/training/record.h"

#include <algorithm>
#include <map>
#include <sstream>

#include <fmt/format.h>

namespace tessera::fuzz {
namespace {

std::string shape(const at::Tensor& tensor) {
  std::ostringstream out;
  out << tensor.scalar_type() << tensor.sizes();
  return out.str();
}

/// How much `name` may differ where all else may differ by `tolerance`. Two sums of the same
/// squares differ by rounding. An evaluation rounds the running statistics of libtorch's instance
/// norm, and some events evaluate on one rank alone.
double allowed_for(const std::string& name, double tolerance) {
  if (name.rfind("norm", 0) == 0) return std::max(tolerance, 1e-5);
  if (name.find("instance_norm.norm.running_") != std::string::npos)
    return std::max(tolerance, 1e-6);
  return tolerance;
}

bool equal(const at::Tensor& a, const at::Tensor& b, double tolerance) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  if (!at::isFloatingType(a.scalar_type())) return at::equal(a, b);
  const auto same = (a == b) | (a.isnan() & b.isnan());
  if (same.all().item<bool>()) return true;
  if (tolerance == 0) return false;
  const auto left = a.to(at::kDouble), right = b.to(at::kDouble);
  return (same | ((left - right).abs() <= tolerance * (1 + right.abs()))).all().item<bool>();
}

/// Zeros for the keys' bias of attention. It changes no result, so that its gradient is what
/// rounding leaves, and an adaptive optimizer makes steps of any size of it.
at::Tensor without_noise(const std::string& name, const at::Tensor& value) {
  if (name.find("in_proj_bias") == std::string::npos || value.dim() != 1) return value;
  const auto third = value.numel() / 3;
  auto result = value.clone();
  result.slice(0, third, 2 * third).zero_();
  return result;
}

}  // namespace

at::Tensor as_pairs(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

void add_number(Record& record, const std::string& name, double value) {
  record.emplace_back(name, at::full({}, value, at::kDouble));
}

void add_weights(Record& record, const ModuleStateDict& weights) {
  for (const auto& [name, tensor] : weights)
    record.emplace_back("weight " + name, as_pairs(tensor));
}

void add_state(Record& record, const OptimizerStateDict& state) {
  for (const auto& [name, values] : state.state) {
    // A parameter without elements has no state worth keeping.
    const bool empty = std::any_of(values.tensors.begin(), values.tensors.end(),
                                   [](const auto& item) { return item.second.numel() == 0; });
    const auto step = values.scalars.find("step");
    const bool untouched = step != values.scalars.end() && step->second == ScalarValue(int64_t{0});
    if (empty || untouched) continue;  // Adagrad's initial state, which not every wrapper makes
    for (const auto& [key, tensor] : values.tensors)
      record.emplace_back("state " + name + " " + key, as_pairs(tensor));
    for (const auto& [key, scalar] : values.scalars)
      add_number(record, "state " + name + " " + key,
                 std::visit([](auto value) { return static_cast<double>(value); }, scalar));
  }
}

std::string difference(const Record& actual, const Record& expected, double tolerance) {
  std::map<std::string, at::Tensor> found(actual.begin(), actual.end());
  for (const auto& [name, value] : expected) {
    const auto at = found.find(name);
    if (at == found.end()) return name + " is missing";
    const bool exact = tolerance == 0;
    const auto mine = exact ? at->second : without_noise(name, at->second);
    const auto plain = exact ? value : without_noise(name, value);
    if (!equal(mine, plain, allowed_for(name, tolerance))) {
      std::ostringstream text;
      text << name << " differs: " << shape(at->second) << " instead of " << shape(value);
      if (at->second.sizes() == value.sizes() && value.numel() > 0) {
        const auto gap = (at->second.to(at::kDouble) - value.to(at::kDouble)).abs();
        text << ", largest distance " << gap.max().item<double>() << " (element "
             << gap.argmax().item<int64_t>() << ") of values up to "
             << value.abs().max().item<double>();
      }
      return text.str();
    }
    found.erase(at);
  }
  return found.empty() ? "" : found.begin()->first + " is there, and plain training has none";
}

}  // namespace tessera::fuzz
