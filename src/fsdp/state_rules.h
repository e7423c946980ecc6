#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/sharded_module.h"

namespace tessera::fsdp {

/// "[3, 4]"
std::string shape_text(at::IntArrayRef sizes);

/// Buffers of the module by name.
std::vector<std::pair<std::string, at::Tensor>> buffers(const ShardedModule& core);

/// Throws on all ranks what any of them found; empty: nothing.
void agree(ShardedModule& core, const std::string& problem);

/// What keeps a state with these shapes from fitting the module; empty when it fits.
std::string mismatch(const ShardedModule& core,
                     const std::map<std::string, std::vector<int64_t>>& given);

}  // namespace tessera::fsdp
