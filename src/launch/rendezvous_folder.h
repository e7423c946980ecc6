#pragma once

#include <string>

#include "launch/fd.h"

namespace tessera::launch {

/// A fresh folder of mode 0700 for the files through which the ranks of one host find each other.
/// The destructor removes it with its contents. Its name contains the boot id of the host and the
/// pid namespace, pid and start time of the owner, which also holds a lock on it. So another
/// launcher, even on another host that shares the folder's parent, can distinguish a folder in use
/// from the folder of a killed launcher.
class RendezvousFolder {
 public:
  /// Makes the folder under rendezvous_base(). Throws UsageError naming the folder.
  RendezvousFolder();
  ~RendezvousFolder();
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  Fd lock_;
};

/// XDG_RUNTIME_DIR if this user owns it and can write to it, else TMPDIR if it is set, else /tmp.
std::string rendezvous_base();

/// Removes the folders in `base` that dead launchers of this user, host and pid namespace have
/// left. Never throws.
void sweep_stale_folders(const std::string& base) noexcept;

/// Removes one folder with its contents, without following links. Never throws.
void remove_folder(const std::string& path) noexcept;

/// Returns a TCP port of the loopback interface that is free at this moment. Throws UsageError if
/// there is none.
int free_port();

}  // namespace tessera::launch
