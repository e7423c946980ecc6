#pragma once

#include <algorithm>
#include <chrono>

#include "tessera/detail/own_process.h"
#include "tessera/process_group.h"

namespace tessera::store {

/// Raises the timeout of the group while alive, because disks may be slow. The earlier one still
/// holds for ranks that are stopped or cannot be reached.
class ScopedTimeout {
 public:
  ScopedTimeout(ProcessGroup group, std::chrono::milliseconds wait)
      : group_(std::move(group)), before_(group_.timeout()) {
    group_.set_timeout(std::max(before_, wait), before_);
  }
  ~ScopedTimeout() {
    if (process_.is_this()) group_.set_timeout(before_);
  }
  ScopedTimeout(const ScopedTimeout&) = delete;

 private:
  ProcessGroup group_;
  std::chrono::milliseconds before_;
  detail::OwnProcess process_;
};

}  // namespace tessera::store
