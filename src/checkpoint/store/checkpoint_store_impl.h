#pragma once

#include <string>

#include "checkpoint/io/folder_lock.h"
#include "tessera/checkpoint_store.h"

namespace tessera {

struct CheckpointStore::Impl {
  std::string folder;
  ProcessGroup group;
  CheckpointStoreOptions options;
  store::FolderLock lock;  // held by rank 0 only
};

}  // namespace tessera
