#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/store/checkpoint_store_impl.h"

namespace tessera::store {

/// Size of a file or folder that another rank has made. Throws Error if this rank does not see it.
uint64_t size_seen(const std::string& path);

/// Commits the checkpoint of `step`, when the files of all ranks are on disk in `folder`: writes
/// the manifest, renames the folder, prunes older checkpoints but those of the steps `keep`, in
/// every place. `records`, on rank
/// 0: the file records of each rank, as text. Throws AgreedError on all ranks; then the checkpoint
/// does not exist, unless the text says that it was committed. Collective.
void commit_files(const CheckpointStore::Impl& run, const std::string& folder, int64_t step,
                  const std::vector<std::string>& records, const std::vector<int64_t>& keep);

}  // namespace tessera::store
