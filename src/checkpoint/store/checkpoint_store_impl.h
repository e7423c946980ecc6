#pragma once

#include <string>

#include "checkpoint/hosts/folder_places.h"
#include "checkpoint/io/folder_lock.h"
#include "tessera/checkpoint_store.h"

namespace tessera {

struct CheckpointStore::Impl {
  std::string folder;
  ProcessGroup group;
  CheckpointStoreOptions options;
  store::FolderLock lock;  // held by the leader of each place
  store::FolderPlaces places;

  bool leads() const { return places.leads(group.rank()); }
};

}  // namespace tessera
