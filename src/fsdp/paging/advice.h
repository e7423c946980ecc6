#pragma once

#include <string>

#include "comm/execution/diverged.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"

// Errors of other parts of the program that an option or a rule of FullyShardedDataParallel causes
// are thrown again with the advice that helps.

namespace tessera::fsdp {

/// Throws UsageError if `error` says that two dtypes cannot be combined and `mixed` changes dtypes.
/// `where`: begins the message. Local.
void advise_on_dtypes(const c10::Error& error, const MixedPrecision& mixed,
                      const std::string& where);

/// Throws UsageError if `error` says that the ranks call different collectives. Local.
void advise_on_order(const UsageError& error);

/// Runs `collective` and throws its errors through advise_on_order().
template <class Collective>
void advised(Collective&& collective) {
  try {
    collective();
  } catch (const comm::Diverged&) {
    throw;
  } catch (const UsageError& error) {
    advise_on_order(error);
    throw;
  }
}

}  // namespace tessera::fsdp
