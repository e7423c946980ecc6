#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

namespace tessera::comm {

/// A separate stream for collectives on a device; on the CPU it does nothing. Events order it with
/// the compute stream.
class CommStream {
 public:
  explicit CommStream(at::Device device) : device_(device) {
    if (!device.is_cpu())
      stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }

  /// While alive, work is issued on the communication stream, behind all work issued so far on the
  /// stream that was current before.
  class Scope {
   public:
    explicit Scope(const CommStream& comm) : Scope(comm, comm.mark_current()) {}
    /// Behind `mark` instead, which may be of another thread.
    Scope(const CommStream& comm, const std::shared_ptr<c10::Event>& mark) {
      if (!comm.stream_) return;
      mark->block(*comm.stream_);
      switched_.emplace(*comm.stream_);
    }

   private:
    std::optional<c10::StreamGuard> switched_;
  };

  /// A point on the communication stream.
  using Mark = std::shared_ptr<c10::Event>;
  Mark mark() const {
    if (!stream_) return nullptr;
    auto event = std::make_shared<c10::Event>(device_.type());
    event->record(*stream_);
    return event;
  }
  Mark mark_current() const {
    if (!stream_) return nullptr;
    auto event = std::make_shared<c10::Event>(device_.type());
    event->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    return event;
  }
  /// Work issued on the current stream from now on runs after `mark`.
  void join(const Mark& mark) const {
    if (mark) mark->block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }

  /// The host waits for all work that was issued on the current stream.
  void wait_for_current() const {
    if (stream_) c10::impl::VirtualGuardImpl(device_.type()).getStream(device_).synchronize();
  }

  /// The allocator reuses the tensor's memory only when this stream has run all work that is issued
  /// on it until then. For memory that was allocated on another stream and may be freed early.
  void keep(const at::Tensor& tensor) const {
    if (stream_)
      c10::impl::VirtualGuardImpl(device_.type())
          .recordDataPtrOnStream(tensor.storage().data_ptr(), *stream_);
  }

  at::Device device() const { return device_; }

 private:
  at::Device device_;
  std::optional<c10::Stream> stream_;
};

}  // namespace tessera::comm
