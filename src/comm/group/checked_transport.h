#pragma once

#include <memory>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// A transport that runs each collective through `inner` and then verifies its result: a sum
/// against the sum of copies of all ranks' inputs, which travel a second time; received values
/// against a digest of the sent ones. A difference throws WrongResult on every rank. CPU tensors
/// only. Takes the memory of two more copies of each input, and more than twice the time.
std::unique_ptr<Transport> make_checked_transport(std::unique_ptr<Transport> inner,
                                                  const World& world);

}  // namespace tessera::comm
