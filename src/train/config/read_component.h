#pragma once

#include <string>

#include "tessera/config/registry.h"

namespace tessera::train {

/// Reads `key: NAME` or `key: {type: NAME, <options>}` and returns that component of `registry`.
/// `name`: the default; when it is empty and the key is absent, the result is an empty Plan.
template <class Plan, class... Context>
Plan read_component(const Registry<Plan, Context...>& registry, OptionReader& options,
                    const std::string& key, std::string name, const std::string& doc,
                    Context... context) {
  OptionReader inner = options.map_or_type(key);
  if (inner.node() != nullptr && name.empty()) inner.require("type", doc);
  inner.read_choice("type", name, registry.names(), doc);
  if (options.describing() || name.empty()) {
    inner.finish();
    return Plan{};
  }
  return registry.read(name, inner, context...);
}

}  // namespace tessera::train
