#pragma once

#include <string>

#include "tessera/error.h"
#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The default group, for a wrapper that was given none. UsageError if there is no default group.
/// Local.
inline ProcessGroup default_group_of(const std::string& wrapper) {
  if (auto group = default_process_group()) return *group;
  throw UsageError(wrapper +
                   ": no group is given, and this process has no world of init_process_group(); "
                   "expected a group, or a world that exists as long as its wrappers");
}

}  // namespace tessera::detail
#pragma GCC visibility pop
