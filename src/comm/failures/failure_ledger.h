#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/base/world.h"
#include "comm/failures/process_failures.h"
#include "comm/failures/waits.h"

namespace tessera::comm {

/// Records in the store which ranks gave up and which ranks they blamed. A survivor that sees
/// another survivor leave, or that waits for it in vain, can then name the rank where the failure
/// began.
class FailureLedger {
 public:
  /// `grace`: how long a rank whose time-out has passed, or almost passed, waits for the records of
  /// the missing ranks. Time-outs pass at almost the same moment on all ranks, so a missing rank
  /// may be about to write its record.
  explicit FailureLedger(const World& world,
                         std::chrono::milliseconds grace = std::chrono::milliseconds(300));

  /// The reason for a missing peer. A peer that leaves when the time-out has almost passed may have
  /// given up itself: Gloo closes its connections before the peer can write its record.
  /// A rank that notices its time-out long after it has passed did not run meanwhile.
  /// late_here: late, on this host. Its ranks see each other directly, so no records are awaited.
  /// damage: data from a suspect arrived damaged; this rank is a suspect too.
  enum class Cause { gone, gone_near_the_time_out, late, overdue, late_here, damage };

  /// Follows the records of `suspects`, which have ended or are late, to the ranks to blame.
  /// Returns these and writes them as this rank's own record. Returns this rank itself if the
  /// others gave up on it first. If the store has ended or does not answer, the rank that serves it
  /// is to blame: it waits for the others' records before it leaves of its own accord. Blocks for
  /// at most one second if the store does not answer, and for a tenth if it has not answered a
  /// group of this process before; otherwise for little more than the grace. Never throws.
  std::vector<int> resolve(const std::vector<int>& suspects, Cause cause) noexcept;

  /// True if the ranks are to blame for data that were damaged between them.
  bool found_damage() const { return found_damage_; }

  /// The member that serves the store; -1: none of them.
  int server() const { return server_; }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  int server_ = -1;
  Waits waits_;
  std::chrono::milliseconds grace_;
  std::shared_ptr<ProcessFailures> failures_;
  std::atomic<bool> found_damage_ = false;
};

}  // namespace tessera::comm
