#pragma once

#include <optional>
#include <string>

#include "tessera/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

/// Throws UsageError for values out of range. Local.
void check_options(const FullyShardedDataParallelOptions& options, int rank);
/// options.device with a number. Throws UsageError for one that this rank cannot use. Local.
std::optional<at::Device> chosen_device(const FullyShardedDataParallelOptions& options,
                                        const ProcessGroup& group);
/// The options that must be equal on all ranks, as a line of a contract.
std::string option_text(const FullyShardedDataParallelOptions& options);

}  // namespace tessera::fsdp
