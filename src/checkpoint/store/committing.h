#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/store/store_impl.h"

namespace tessera::store {

/// Size of a file, or of a folder, that another rank has made. Throws Error where rank 0's folder
/// is not this rank's.
uint64_t size_seen(const std::string& path);

/// Rank 0's work when all ranks' files are on disk: makes the checkpoint of `step` of `folder`, in
/// which they are, and prunes. `records`: what each rank says of its files, by rank. Throws
/// UsageError or Error, after which there is no such checkpoint unless the text says that there is.
void commit_files(const CheckpointStore::Impl& run, const std::string& folder, int64_t step,
                  const std::vector<std::string>& records);

}  // namespace tessera::store
