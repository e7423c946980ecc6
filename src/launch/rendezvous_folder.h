#pragma once

#include <string>

namespace tessera::launch {

/// A fresh folder of mode 0700 for the files through which the ranks of one host find each other.
/// The destructor removes it with its contents. Its name contains the pid namespace, pid and start
/// time of the owner, so that another launcher can distinguish a folder in use from one that a
/// killed launcher left.
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
};

/// XDG_RUNTIME_DIR if this user owns it and can write to it, else TMPDIR if it is set, else /tmp.
std::string rendezvous_base();

/// Removes the folders in `base` that dead launchers of this user and pid namespace have left.
/// Never throws.
void sweep_stale_folders(const std::string& base) noexcept;

/// Removes one folder with its contents, without following links. Never throws.
void remove_folder(const std::string& path) noexcept;

/// Returns a TCP port of the loopback interface that is free at this moment. Throws UsageError if
/// there is none.
int free_port();

}  // namespace tessera::launch
