#pragma once

#include <vector>

#include "fuzz/training/case.h"
#include "tessera/wire.h"

namespace tessera::fuzz {

// The option `wire` of a wrapper: "wire_gradients" and "wire_parameters", each "bfloat16" or
// "int8".

/// The number of each rank's host; empty: all are on one.
std::vector<int> hosts_of(const Item& wrapper, int world);

WireOptions wire_of(const Item& wrapper);

/// Values that travel between hosts are rounded under this wrapper, or after this "move".
bool rounds(const Item& wrapper);
/// In some part of the story.
bool rounds(const Case& which);

/// The wrapper must refuse its option `wire`. Whether it does is not said, and generate() makes no
/// such case, where only some parameters are float64, and for `check_results` of FSDP, whose groups
/// may each lie within one host.
bool refuses_wire(const Case& which, const Item& wrapper, int world);

}  // namespace tessera::fuzz
