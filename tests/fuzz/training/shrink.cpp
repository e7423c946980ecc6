#include <functional>

#include "fuzz/training/worker.h"

namespace tessera::fuzz {
namespace {

/// All cases that are one step smaller, the largest steps first.
std::vector<Case> smaller(const Case& which) {
  std::vector<Case> list;
  const auto add = [&](const std::function<void(Case&)>& change) {
    list.push_back(which);
    change(list.back());
  };
  const auto events = which.story.size();
  for (size_t length = events / 2; length > 1; length /= 2) {
    for (size_t begin = 0; begin + length <= events; begin += length)
      add([&](Case& c) {
        const auto at = c.story.begin() + static_cast<std::ptrdiff_t>(begin);
        c.story.erase(at, at + static_cast<std::ptrdiff_t>(length));
      });
  }
  for (size_t i = events; i-- > 0;)
    add([&](Case& c) { c.story.erase(c.story.begin() + static_cast<std::ptrdiff_t>(i)); });
  for (size_t i = which.layers.size(); i-- > 0;)
    add([&](Case& c) { c.layers.erase(c.layers.begin() + static_cast<std::ptrdiff_t>(i)); });
  for (const auto& value : which.wrapper.values)
    add([&](Case& c) { c.wrapper.values.erase(value.first); });
  for (size_t i = 0; i < events; ++i)
    for (const auto& value : which.story[i].values)
      add([&](Case& c) { c.story[i].values.erase(value.first); });
  for (size_t i = 0; i < which.layers.size(); ++i)
    for (const auto& value : which.layers[i].values)
      add([&](Case& c) { c.layers[i].values.erase(value.first); });
  for (const auto& value : which.optimizer.values)
    if (value.first != "lr") add([&](Case& c) { c.optimizer.values.erase(value.first); });
  if (which.world > 2) add([](Case& c) { --c.world; });
  return list;
}

}  // namespace

Case shrink(Case which, const std::string& kind, std::chrono::seconds patience, int trials) {
  for (bool found = true; found;) {
    found = false;
    for (const auto& candidate : smaller(which)) {
      if (trials-- <= 0) return which;
      const auto finding = run_in_child(candidate, patience);
      if (!finding || finding->kind != kind) continue;
      which = candidate;
      found = true;
      break;
    }
  }
  return which;
}

}  // namespace tessera::fuzz
