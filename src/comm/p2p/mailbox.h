#pragma once

#include <chrono>
#include <memory>
#include <stdexcept>

#include <ATen/ATen.h>

#include "comm/base/world.h"

namespace tessera::comm {

/// Data of a message arrived and differ from the sent data.
class DamagedMessage : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One message in flight.
class Message {
 public:
  virtual ~Message() = default;
  /// Blocks until the message is complete. Throws when it fails or the time-out passes;
  /// DamagedMessage if that is why.
  virtual void wait(std::chrono::milliseconds timeout) = 0;
  /// From any thread: makes a blocked wait() throw soon.
  virtual void abort() noexcept = 0;
};

/// Tagged point-to-point messages between the ranks of one group, over TCP, Gloo, MPI or a
/// caller's c10d backend. Tensors are contiguous and must outlive their message.
class Mailbox {
 public:
  virtual ~Mailbox() = default;
  virtual const char* name() const = 0;
  virtual std::unique_ptr<Message> send(at::Tensor contiguous, int to, int tag) = 0;
  virtual std::unique_ptr<Message> receive(at::Tensor contiguous, int from, int tag) = 0;
};

/// Messages over TCP connections of our own, made when a pair of ranks needs one; on loopback alone
/// when the world is on one host. Its messages keep their tensors. Collective: blocks until all
/// members have come. Throws BrokenWorldError when they do not, and UsageError for a
/// GLOO_SOCKET_IFNAME without an address.
std::unique_ptr<Mailbox> make_tcp_mailbox(const World& world);

/// make_communicator_mailbox() if MPI carries the messages, else make_gloo_mailbox() if
/// GLOO_DEVICE_TRANSPORT selects a transport of Gloo other than TCP, such as TCP_TLS; else
/// make_tcp_mailbox().
std::unique_ptr<Mailbox> make_default_mailbox(const World& world);

/// Connects the members through Gloo; on loopback alone when the world is on one host. Collective:
/// blocks until all members have connected. Throws BrokenWorldError when they cannot.
std::unique_ptr<Mailbox> make_gloo_mailbox(const World& world);

/// Messages over the program's MPI, on a communicator of the members alone. Collective: blocks
/// until all members have come. Throws UsageError if the world was not made of a communicator, and
/// BrokenWorldError if members do not come.
std::unique_ptr<Mailbox> make_communicator_mailbox(const World& world);

}  // namespace tessera::comm
