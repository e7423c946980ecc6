#pragma once

#include <signal.h>

namespace tessera::comm {

/// Blocks SIGPIPE on this thread while alive. A write to a peer that has ended then fails with
/// EPIPE and does not end the process. Threads started meanwhile inherit the block. Gloo and c10d's
/// store write to sockets without MSG_NOSIGNAL. Under Python this has no effect, because Python
/// ignores SIGPIPE, but a C++ program would end without a message. The program's own handling of
/// SIGPIPE on other threads is unchanged.
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
