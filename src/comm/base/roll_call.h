#pragma once

#include <chrono>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// The entry of one rank in a roll call.
struct Presence {
  int size = 0;  ///< The world size that this rank was told.
  std::string value;
};

/// The time for a roll call has passed.
class RanksMissing : public std::runtime_error {
 public:
  explicit RanksMissing(std::vector<int> absent)
      : std::runtime_error("ranks are missing"), ranks(std::move(absent)) {}
  std::vector<int> ranks;  ///< The ranks that have written nothing. Not empty.
};

/// Tells every rank what each rank has written under `name` in the store. All ranks call it; blocks
/// until all have. The ranks merge their values on a binomial tree, so a rank asks for at most
/// ceil(log2 size) + 1 keys, each until it is there. `value` has no line end.
///
/// The result has one entry a rank. Exception: if ranks were told different world sizes, it may
/// have fewer, but always one of this rank and one with another size.
///
/// Throws RanksMissing at `deadline`, and what the store throws.
std::map<int, Presence> roll_call(const c10::intrusive_ptr<c10d::Store>& store,
                                  const std::string& name, int rank, int size,
                                  const std::string& value,
                                  std::chrono::steady_clock::time_point deadline);

}  // namespace tessera::comm
