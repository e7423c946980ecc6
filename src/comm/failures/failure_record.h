#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::comm {

/// The record that a rank writes to the store of its group when it gives up.
struct FailureRecord {
  int64_t order = 0;     ///< Position among the ranks that gave up, from 1.
  bool verdict = false;  ///< Final, and written after a time-out.
  std::vector<int> blamed;
  bool damage = false;  ///< Data were damaged on the way between the blamed.
};

std::string failure_key(int rank);
/// Nothing if the rank has no record, or the rank that serves the store has ended.
std::optional<FailureRecord> read_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank);
/// Does nothing if the rank that serves the store has ended.
void write_failure(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                   const FailureRecord& record);
/// The order of the next record; 0 if the rank that serves the store has ended.
int64_t next_failure(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace tessera::comm
