#pragma once

#include <string>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "tessera/detail/running_collectives.h"

namespace tessera::comm {

/// See detail::running_collectives().
int list_running(detail::RunningCollective* out, int most) noexcept;

/// While the object lives, running_collectives() lists this collective. If more run at once than
/// the list has places, the last ones are not listed. `world` and `transport` must live longer.
class RunningScope {
 public:
  RunningScope(const World& world, const Transport& transport, const OpHeader& header,
               const std::string& tag) noexcept;
  ~RunningScope();
  RunningScope(const RunningScope&) = delete;
  RunningScope& operator=(const RunningScope&) = delete;

  /// All ranks have begun the collective.
  void begun_by_all() noexcept;

 private:
  struct Slot;
  friend int list_running(detail::RunningCollective* out, int most) noexcept;
  static Slot* slots() noexcept;

  Slot* slot_ = nullptr;
};

}  // namespace tessera::comm
