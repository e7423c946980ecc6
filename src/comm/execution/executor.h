#pragma once

#include "comm/execution/call.h"
#include "tessera/process_group.h"

namespace tessera::comm {

enum class Mode {
  wait,  ///< The call is complete when issue() returns.
  work,  ///< The returned Work tells when it is.
};

/// Runs the collectives of one group on this rank. A group chooses its executor when it is made.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual Work issue(Call call, Mode mode) = 0;
  /// Waits until a device has run the group's collectives: the other ranks need this rank's part.
  virtual void drain() noexcept {}
};

}  // namespace tessera::comm
