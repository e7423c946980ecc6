#pragma once

#include <cstdint>
#include <vector>

#include "comm/base/world.h"

namespace tessera::comm {

/// The number of ranks that have waited for a rank until the time-out, and that the store has not
/// answered since. If that rank serves the store and is stopped, it finds this when it continues.
/// The ranks may have waited in other groups than the one in which this rank fails, so these notes
/// are keyed by the ranks of the start-up group, in its store.
class Waits {
 public:
  explicit Waits(const World& world);

  /// This rank has waited for these members of its group (1), or the store has answered it since
  /// (-1). A stopped store gets the first note when it continues; the call blocks until then.
  void note(const std::vector<int>& missing, int64_t change) const;
  bool on_this_rank() const;
  bool on_any() const;

 private:
  int64_t count(int rank) const;

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::vector<int> members_;
};

}  // namespace tessera::comm
