#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "fsdp/paging/use_order.h"

// [Note: ranks without data] In a join, while some ranks have no data, the first rank with data is
// the join leader: before each action that needs all ranks, it broadcasts a JoinEvent to the ranks
// without data. They take the same action with gradients of zero. So they follow any path through
// the model, even a path that they have never run, and end with the same record of use and the same
// gathered units as all other ranks. Events describe the causes of decisions, not their results:
// every rank decides by itself what to release and prefetch, with the same result.

namespace tessera::fsdp {

// each() calls `field` with every field; a list is the last one.
struct ForwardBegins {
  bool full_precision = false;
  void each(auto&& field) { field(full_precision); }
  bool operator==(const ForwardBegins&) const = default;
};
struct ForwardEnds {
  void each(auto&& field) {}
  bool operator==(const ForwardEnds&) const = default;
};
/// An operator uses `units`.
struct UnitsUsed {
  Phase phase = Phase::forward;
  std::vector<size_t> units;
  void each(auto&& field) { field(phase), field(units); }
  bool operator==(const UnitsUsed&) const = default;
};
/// The first gradient of a flat parameter has arrived. `sync`: false under no_sync().
struct FirstGradient {
  bool sync = true;
  size_t flat = 0;
  void each(auto&& field) { field(sync), field(flat); }
  bool operator==(const FirstGradient&) const = default;
};
/// The gradients of a flat parameter are reduced. `forwards`: that were not under no_sync().
/// `used`: for each member, whether it has a gradient.
struct GradientsReduced {
  size_t flat = 0;
  uint64_t forwards = 0;
  std::vector<char> used;
  void each(auto&& field) { field(flat), field(forwards), field(used); }
  bool operator==(const GradientsReduced&) const = default;
};
struct BackwardEnds {
  bool reduced = true;
  void each(auto&& field) { field(reduced); }
  bool operator==(const BackwardEnds&) const = default;
};

using JoinEvent = std::variant<ForwardBegins, ForwardEnds, UnitsUsed, FirstGradient,
                               GradientsReduced, BackwardEnds>;

/// Serializes an event for a broadcast within one job: native integers.
std::string to_bytes(JoinEvent event);
JoinEvent event_from_bytes(std::string_view bytes);

}  // namespace tessera::fsdp
