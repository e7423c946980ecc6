#pragma once

#include <memory>
#include <vector>

#include <c10/core/Event.h>
#include <torch/types.h>

namespace tessera::comm {

/// Pinned memory of the host, which copies to and from a device read and write in place. Memory is
/// used again when the device has read it. For one thread at a time.
class PinnedBuffers {
 public:
  /// Waits until the device has read what it was sent.
  ~PinnedBuffers();

  /// A flat tensor of undefined values, with the dtype of `like`. Valid until clear(), and if it is
  /// sent, until the device has read it.
  at::Tensor take(int64_t numel, const at::Tensor& like);
  /// Copies `part`, all or a part of a taken tensor, to `to`, on the current stream.
  void send(const at::Tensor& part, at::Tensor to);
  /// Frees the buffers that were taken and are not being sent.
  void clear();

 private:
  struct Buffer {
    at::Tensor bytes;
    bool taken = false;
    std::shared_ptr<c10::Event> sent;  // the device has read it; null: it reads nothing
  };
  Buffer& owner_of(const at::Tensor& part);

  std::vector<Buffer> buffers_;
};

}  // namespace tessera::comm
