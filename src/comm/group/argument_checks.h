#pragma once

#include <string>

#include <fmt/format.h>

#include "comm/group/process_group_impl.h"
#include "tessera/error.h"

namespace tessera {

/// Throws UsageError "ProcessGroup.<method>: rank R: <problem>" unless `condition`.
inline void require(bool condition, const ProcessGroup::Impl& impl, const char* method,
                    const std::string& problem) {
  if (!condition)
    throw UsageError(fmt::format("ProcessGroup.{}: rank {}: {}", method, impl.world.rank, problem));
}

inline void check_root(const ProcessGroup::Impl& impl, const char* method, int root) {
  require(root >= 0 && root < impl.world.size, impl, method,
          fmt::format("root is {}; expected 0 to {}", root, impl.world.size - 1));
}

}  // namespace tessera
