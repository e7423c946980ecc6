#pragma once

#include <chrono>
#include <future>
#include <optional>
#include <thread>
#include <utility>

#include "comm/base/sigpipe.h"

namespace tessera::comm {

/// What `body` returns or throws, or nothing when `limit` passes first: calls of c10d's stores
/// block for ever where the other side is silent, and nothing interrupts them. `body` runs on a
/// thread of its own, which is then left behind; so it must own all that it touches.
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
