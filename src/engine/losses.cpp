#include "tessera/step/losses.h"

#include <set>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera {

namespace {

at::Tensor checked_mean(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](const std::string& problem) {
    throw UsageError(fmt::format("parse_losses: \"{}\" {}", name, problem));
  };
  if (!tensor.defined()) refuse("is an undefined tensor; expected a value");
  if (tensor.numel() == 0) refuse("has no elements, so it has no mean");
  if (!tensor.is_floating_point()) {
    refuse(fmt::format("is of {}; expected a floating-point tensor",
                       c10::toString(tensor.scalar_type())));
  }
  return tensor.mean();
}

at::Tensor value_of(const std::string& name,
                    const std::variant<at::Tensor, std::vector<at::Tensor>>& entry) {
  if (const auto* tensor = std::get_if<at::Tensor>(&entry)) return checked_mean(name, *tensor);
  at::Tensor sum;
  for (const auto& tensor : std::get<std::vector<at::Tensor>>(entry)) {
    const auto mean = checked_mean(name, tensor);
    sum = sum.defined() ? sum + mean : mean;
  }
  if (!sum.defined()) {
    throw UsageError(
        fmt::format("parse_losses: \"{}\" is an empty list; expected at least one tensor", name));
  }
  return sum;
}

}  // namespace

ParsedLosses parse_losses(const Losses& losses) {
  ParsedLosses parsed;
  std::set<std::string> seen;
  std::string names;
  for (const auto& [name, entry] : losses) {
    if (!seen.insert(name).second) {
      throw UsageError(
          fmt::format("parse_losses: \"{}\" is given twice; expected each name once", name));
    }
    names += (names.empty() ? "\"" : ", \"") + name + '"';
    const auto value = value_of(name, entry);
    if (name != "loss") parsed.values.emplace_back(name, value.detach());
    if (name.find("loss") != std::string::npos)
      parsed.total = parsed.total.defined() ? parsed.total + value : value;
  }
  if (!parsed.total.defined()) {
    throw UsageError(fmt::format(
        "parse_losses: nothing to minimise in {}; expected a name that contains \"loss\"",
        names.empty() ? "an empty map" : names));
  }
  parsed.values.emplace(parsed.values.begin(), "loss", parsed.total.detach());
  return parsed;
}

}  // namespace tessera
