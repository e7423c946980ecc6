#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// Connects to the store that torchrun's agent serves at MASTER_ADDR:MASTER_PORT. It is c10d's
/// TCPStore, so nothing proves a secret there. May block for longer than `timeout` if another
/// service answers, so call it through call_with_timeout().
c10::intrusive_ptr<c10d::Store> agent_store(const LaunchEnvironment& environment,
                                            std::chrono::milliseconds timeout);

/// Throws the BrokenWorldError of a rank that cannot use the store at MASTER_ADDR:MASTER_PORT, for
/// `reason`.
[[noreturn]] void throw_useless_store(const LaunchEnvironment& environment,
                                      std::chrono::milliseconds timeout, const std::string& reason);

}  // namespace tessera::comm
