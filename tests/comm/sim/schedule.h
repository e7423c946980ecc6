#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <string>

namespace tessera::sim {

/// Numbers of one seed.
class Dice {
 public:
  explicit Dice(uint64_t seed) : engine_(seed) {}
  /// From 0 to n - 1.
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t least, int64_t most) { return least + below(most - least + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }

 private:
  std::mt19937_64 engine_;
};

/// How often something happened, for the summary.
using Counts = std::map<std::string, int64_t>;

/// What went wrong in one schedule; empty: nothing. Adds what it tried to `counts`.
/// Ranks with TcpConnections, between which this program carries the bytes.
std::string run_ranks(uint64_t seed, Counts& counts);
/// Ranks and strangers at the Sessions of a store.
std::string run_store(uint64_t seed, Counts& counts);

}  // namespace tessera::sim
