#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "fuzz/training/case.h"
#include "fuzz/training/model/random.h"

namespace tessera::fuzz {

using Values = std::map<std::string, std::string>;

inline void maybe(Random& random, int percent, Values& values, const std::string& name,
                  const std::string& value = "1") {
  if (random.chance(percent)) values[name] = value;
}

/// Some of `items` is of one of the `kinds`.
inline bool has(const std::vector<Item>& items, std::initializer_list<const char*> kinds) {
  return std::any_of(items.begin(), items.end(), [&](const Item& item) {
    return std::any_of(kinds.begin(), kinds.end(),
                       [&](const char* kind) { return item.kind == kind; });
  });
}

/// Has parameters of 16 bits.
inline bool is_short(const Item& layer) {
  return layer.kind == "bfloat16_layer" || layer.kind == "half_layer";
}

/// What a case has much of. Otherwise a combination of several rare options and events would need
/// thousands of seeds.
enum class Theme {
  any,           ///< Of everything something.
  trainability,  ///< Parts that are frozen and thawed.
  states,        ///< Saved and loaded states.
  accumulation,  ///< Several backward passes for a step, which use different parameters.
  joins,         ///< With buffers.
  wire,          ///< Rounded values between hosts.
  faults,        ///< An error, after few events.
};

/// Draws what a seed gets after everything else.
void vary(Random& random, Theme theme, Case& which);

}  // namespace tessera::fuzz
