#pragma once

#include <signal.h>

namespace tessera::comm {

/// While it lives, a write of this thread to a peer that is gone fails with EPIPE instead of ending
/// the process, and threads that are started inherit that. Gloo and c10d's store write to sockets
/// without MSG_NOSIGNAL: under Python nobody sees it, because Python ignores SIGPIPE, but a C++
/// program would end without a word. What the program wants of SIGPIPE elsewhere stays as it is.
class SigpipeBlocked {
 public:
  SigpipeBlocked() noexcept;
  ~SigpipeBlocked();
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  sigset_t former_;
};

}  // namespace tessera::comm
