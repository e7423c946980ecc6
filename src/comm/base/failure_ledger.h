#pragma once

#include <chrono>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/base/world.h"

namespace tessera::comm {

/// Who gave up, and whom they blamed, kept in the store so that a survivor that sees another
/// survivor leave, or misses it, can name the rank where it began.
class FailureLedger {
 public:
  /// `grace`: how long a rank whose time is almost up waits for the reasons of those it misses.
  /// Their times are up within moments of each other, and they may yet write.
  explicit FailureLedger(const World& world,
                         std::chrono::milliseconds grace = std::chrono::milliseconds(300));

  /// A peer that goes when the time is almost up may have given up itself: Gloo closes its
  /// connections before it can say why.
  enum class Cause { gone, gone_near_the_time_out, late };

  /// The ranks to blame for `suspects` being gone or late, after following what they recorded; and
  /// records that as this rank's own reason. It is this rank itself where the others gave up on it
  /// first. Never throws, and takes no longer than a second more than the grace, whatever has
  /// become of the store.
  std::vector<int> resolve(const std::vector<int>& suspects, Cause cause) noexcept;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::chrono::milliseconds grace_;
};

}  // namespace tessera::comm
