#pragma once

#include <string>

namespace tessera::launch {

/// A fresh folder of mode 0700 for the files through which the ranks of one host meet; removed with
/// all it holds when the object ends. Its name carries the pid namespace, pid and start time of the
/// owner, so that another launcher can tell a folder in use from one that a killed launcher left.
class RendezvousFolder {
 public:
  /// Under XDG_RUNTIME_DIR when that is ours and writable, else TMPDIR, else /tmp. Throws
  /// UsageError naming the folder.
  RendezvousFolder();
  ~RendezvousFolder();
  RendezvousFolder(const RendezvousFolder&) = delete;
  RendezvousFolder& operator=(const RendezvousFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// The folder under which RendezvousFolder makes its own.
std::string rendezvous_base();

/// Removes the folders in `base` that dead launchers of this user and pid namespace left. Never
/// throws.
void sweep_stale_folders(const std::string& base) noexcept;

/// Removes one folder and what is in it, without following links. Never throws.
void remove_folder(const std::string& path) noexcept;

/// A free TCP port of the loopback interface at this moment. Throws UsageError when there is none.
int free_port();

}  // namespace tessera::launch
