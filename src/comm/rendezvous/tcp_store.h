#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// Connects to the store at MASTER_ADDR:MASTER_PORT, which rank 0 serves unless the launcher does.
/// May block for longer than `timeout` if another service answers there, so call it through
/// call_with_timeout().
c10::intrusive_ptr<c10d::Store> tcp_store(const LaunchEnvironment& environment,
                                          std::chrono::milliseconds timeout);

/// Throws the BrokenWorldError of a rank that cannot use that store, for `reason`.
[[noreturn]] void throw_useless_store(const LaunchEnvironment& environment,
                                      std::chrono::milliseconds timeout, const std::string& reason);

}  // namespace tessera::comm
