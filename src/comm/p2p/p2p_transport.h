#pragma once

#include <functional>
#include <memory>
#include <string>

#include "comm/base/transport.h"
#include "comm/base/world.h"

namespace tessera::comm {

/// One message in flight; wait() throws when it fails or the time-out passes.
class Message {
 public:
  virtual ~Message() = default;
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  virtual void abort() noexcept = 0;
};

/// Tagged point-to-point messages between the ranks of one group, over Gloo, MPI or a caller's c10d
/// backend.
class Mailbox {
 public:
  virtual ~Mailbox() = default;
  virtual const char* name() const = 0;
  virtual std::unique_ptr<Message> send(at::Tensor contiguous, int to, int tag) = 0;
  virtual std::unique_ptr<Message> receive(at::Tensor contiguous, int from, int tag) = 0;
};

/// Loopback when the world is on one host. Blocks until all members have connected.
std::unique_ptr<Mailbox> make_gloo_mailbox(const World& world);

/// Collectives built from messages alone, so that they do not depend on what a backend offers
/// (libtorch 1.13's Gloo lacks reduce_scatter, and its list all_gather copies twice) and so that
/// each wait knows whom it waits for. Bytes sent per rank, N the whole tensor: all_gather and
/// reduce_scatter (W-1)/W N, all_reduce 2 (W-1)/W N (N for small tensors, in one round), broadcast
/// from the root 2 (W-1)/W N (scatter, then all-gather) or (W-1) N when small.
std::unique_ptr<Transport> make_p2p_transport(const World& world, std::unique_ptr<Mailbox> mailbox);

}  // namespace tessera::comm
