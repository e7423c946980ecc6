#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "comm/base/sigpipe_blocked.h"

namespace tessera::comm {

/// Returns what `body` returns, rethrows what it throws, or returns nullopt when `limit` passes
/// first. For calls of c10d's stores, which block forever when the server does not answer and
/// cannot be interrupted. `body` runs on a thread of its own, which continues after the limit, so
/// it must own everything that it uses.
template <typename Body>
auto call_with_timeout(std::chrono::milliseconds limit, Body body)
    -> std::optional<decltype(body())> {
  std::packaged_task<decltype(body())()> task(std::move(body));
  auto result = task.get_future();
  std::thread thread;
  {
    const SigpipeBlocked inherited;
    thread = std::thread(std::move(task));
  }
  if (result.wait_for(limit) != std::future_status::ready) {
    thread.detach();
    return std::nullopt;
  }
  thread.join();
  return result.get();
}

}  // namespace tessera::comm
