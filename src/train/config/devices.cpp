#include "tessera/train/devices.h"

#include <algorithm>
#include <map>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/device_generator.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Kinds = std::map<std::string, DeviceKind>;

Kinds& kinds() {
  static auto& all = *new Kinds{
      {"cpu", {at::kCPU}},
      {"cuda", {at::kCUDA, [](at::Device d) { return at::globalContext().defaultGenerator(d); }}}};
  return all;
}

struct Choice {
  std::string name;
  std::optional<std::string> number;
};

Choice split(const std::string& text) {
  const auto colon = text.find(':');
  if (colon == std::string::npos) return {text, std::nullopt};
  return {text.substr(0, colon), text.substr(colon + 1)};
}

bool is_number(const std::string& text) {
  constexpr size_t kMostDigits = 2;  // the largest index is 127
  return !text.empty() && text.size() <= kMostDigits &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

int count_of(at::DeviceType type) {
  if (type == at::kCPU) return 1;
  if (!c10::impl::hasDeviceGuardImpl(type)) return 0;
  return c10::impl::VirtualGuardImpl(type).deviceCount();
}

}  // namespace

void registry::add_device(const std::string& name, DeviceKind kind) {
  const auto type = kind.type;
  const auto generator = kind.generator;
  const bool good = !name.empty() && name.find(':') == std::string::npos;
  if (!good || !kinds().emplace(name, std::move(kind)).second)
    throw UsageError(fmt::format("registry: device \"{}\" {}", name,
                                 good ? "is registered already; expected another name"
                                      : "; expected a name without a colon"));
  if (generator) detail::set_device_generator(type, generator);
}

std::string device_problem(const std::string& text) {
  const auto [name, number] = split(text);
  const bool numbered = name != "cpu" && number && is_number(*number);
  if (kinds().count(name) > 0 && (!number || numbered)) return "";
  std::vector<std::string> names;
  for (const auto& [known, kind] : kinds()) names.push_back(known);
  return fmt::format("\"{}\"; expected one of {}, or one but cpu with a number, such as cuda:1",
                     text, fmt::join(names, ", "));
}

at::Device device_of(const std::string& text, int local_rank) {
  if (const auto problem = device_problem(text); !problem.empty()) throw UsageError(problem);
  const auto [name, number] = split(text);
  const auto type = kinds().at(name).type;
  if (type == at::kCPU) return at::kCPU;
  const int count = count_of(type);
  if (count == 0) {
    const bool cuda = type == at::kCUDA;
    throw UsageError(fmt::format("{}, and this process sees no {} device{}; expected cpu", text,
                                 cuda ? "CUDA" : name,
                                 cuda ? ", or Tessera was built without TESSERA_WITH_NCCL" : ""));
  }
  const int index = number ? std::stoi(*number) : local_rank % count;
  if (index >= count)
    throw UsageError(fmt::format("{}, and this process sees {} {} device{}; expected at most {}:{}",
                                 text, count, name, count == 1 ? "" : "s", name, count - 1));
  return {type, static_cast<c10::DeviceIndex>(index)};
}

at::Generator generator_of(at::Device device) {
  for (const auto& [name, kind] : kinds()) {
    if (kind.type != device.type()) continue;
    return kind.generator ? kind.generator(device) : at::detail::getDefaultCPUGenerator();
  }
  throw UsageError("device " + device.str() + " is not registered; expected add_device()");
}

}  // namespace tessera
