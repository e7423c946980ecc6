#pragma once

#include <string>

#include <fmt/format.h>

#include "comm/group/process_group_impl.h"
#include "tessera/error.h"

namespace tessera {

/// UsageError "ProcessGroup.<what>: rank R: <problem>" unless `condition`.
inline void require(bool condition, const ProcessGroup::Impl& impl, const char* what,
                    const std::string& problem) {
  if (!condition)
    throw UsageError(fmt::format("ProcessGroup.{}: rank {}: {}", what, impl.world.rank, problem));
}

inline void check_root(const ProcessGroup::Impl& impl, const char* what, int root) {
  require(root >= 0 && root < impl.world.size, impl, what,
          fmt::format("root is {}; expected 0 to {}", root, impl.world.size - 1));
}

}  // namespace tessera
