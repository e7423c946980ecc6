#include "sharding/wrapped_parameters.h"

#include <mutex>
#include <unordered_map>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::sharding {
namespace {

struct Registry {
  std::mutex mutex;
  // The entries hold the tensors, so no address is used again while it is a key.
  std::unordered_multimap<const void*, const WrappedParameters::Entry*> entries;
};

Registry& registry() {
  static auto* const instance = new Registry;  // must outlive wrappers that are static objects
  return *instance;
}

bool reduces(Use use) { return use == Use::reduces_in_backward || use == Use::reduces_in_step; }

}  // namespace

struct WrappedParameters::Entry {
  Entry(std::string name, Use purpose) : component(std::move(name)), use(purpose) {}
  Entry(const Entry&) = delete;
  ~Entry() {
    auto& known = registry();
    std::lock_guard lock(known.mutex);
    for (const auto& tensor : tensors) {
      const auto range = known.entries.equal_range(tensor.unsafeGetTensorImpl());
      for (auto at = range.first; at != range.second; ++at) {
        if (at->second != this) continue;
        known.entries.erase(at);
        break;
      }
    }
  }

  std::string component;
  Use use;
  std::vector<at::Tensor> tensors;
};

namespace {

/// The reason why a wrapper cannot use a parameter that `other` has; "" if it can.
std::string conflict(Use use, const std::string& component, const WrappedParameters::Entry& other) {
  if (other.use == Use::shards) {
    return fmt::format(
        "already sharded by {0}; expected parameters that no wrapper shards: give the optimizer "
        "{0}::parameters(), and use one wrapper only",
        other.component);
  }
  if (use == Use::shards || other.component == component) {
    if (use == Use::reduces_in_step || use == Use::updates) return "";  // a new optimizer
    return fmt::format(
        "already wrapped by {}; expected a plain module, or that the earlier wrapper is destroyed "
        "first",
        other.component);
  }
  if (!reduces(use) || !reduces(other.use)) return "";
  if (other.use == Use::reduces_in_step) {
    return fmt::format(
        "already given to a {}, which reduces its gradient too; construct {} first and the "
        "optimizer after it, or set reduce_gradients = false there",
        other.component, component);
  }
  return fmt::format("already wrapped by {}, which reduces its gradient too; expected one of them",
                     other.component);
}

}  // namespace

WrappedParameters::WrappedParameters(const std::string& component, int rank, Use use,
                                     const std::vector<NamedTensor>& parameters) {
  auto entry = std::make_shared<Entry>(component, use);
  auto& known = registry();
  std::string problem;
  {
    std::lock_guard lock(known.mutex);
    for (const auto& [name, tensor] : parameters) {
      const auto range = known.entries.equal_range(tensor.unsafeGetTensorImpl());
      for (auto at = range.first; at != range.second && problem.empty(); ++at) {
        problem = conflict(use, component, *at->second);
        if (!problem.empty()) problem = fmt::format("parameter {} is {}", name, problem);
      }
      if (!problem.empty()) break;
    }
    if (problem.empty()) {
      for (const auto& parameter : parameters) {
        entry->tensors.push_back(parameter.tensor);
        known.entries.emplace(parameter.tensor.unsafeGetTensorImpl(), entry.get());
      }
    }
  }
  // Without the lock: the use of a parameter may wait for other ranks.
  for (size_t i = 0; i < parameters.size() && problem.empty(); ++i) {
    try {
      parameters[i].tensor.detach();
    } catch (const UsageError& error) {  // a wrapper was destroyed with the memory
      problem = fmt::format("parameter {} has no memory: {}", parameters[i].name, error.what());
    }
  }
  if (!problem.empty()) throw UsageError(fmt::format("{}: rank {}: {}", component, rank, problem));
  entry_ = std::move(entry);
}

std::string WrappedParameters::reducer_of(const std::vector<NamedTensor>& parameters) {
  auto& known = registry();
  std::lock_guard lock(known.mutex);
  for (const auto& parameter : parameters) {
    const auto range = known.entries.equal_range(parameter.tensor.unsafeGetTensorImpl());
    for (auto at = range.first; at != range.second; ++at)
      if (at->second->use == Use::reduces_in_backward) return at->second->component;
  }
  return "";
}

}  // namespace tessera::sharding
