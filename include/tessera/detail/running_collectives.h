#pragma once

#include <array>
#include <cstdint>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// A collective that a thread of this process is in, for reports about a rank that hangs.
struct RunningCollective {
  static constexpr int kMostLate = 32;

  uint64_t number = 0;         ///< of the collective in its group, from 1
  const char* operation = "";  ///< "all_reduce"
  int64_t numel = 0;
  std::array<char, 96> tag{};  ///< its purpose; may be cut; ends with 0
  int size = 0;                ///< ranks in its group
  /// Every rank has begun it: the headers were compared.
  bool begun_by_all = false;
  /// Ranks of the start-up group that this rank waits for now, the first kMostLate of them. Known
  /// in shared memory only.
  std::array<int, kMostLate> late{};
  int late_count = 0;
};

/// Copies the collectives that run now to `out`, at most `most`, and returns their number. A
/// collective of NCCL is no longer listed once it is on the device's stream. Takes no lock,
/// allocates nothing, never blocks; from any thread. Local.
int running_collectives(RunningCollective* out, int most) noexcept;

}  // namespace tessera::detail
#pragma GCC visibility pop
