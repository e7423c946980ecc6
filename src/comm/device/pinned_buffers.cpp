#include "comm/device/pinned_buffers.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::comm {
namespace {

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

const char* begin_of(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.data_ptr());
}

}  // namespace

PinnedBuffers::~PinnedBuffers() {
  for (const auto& buffer : buffers_) {
    try {
      while (buffer.sent && !buffer.sent->query())
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } catch (...) {  // the device has an error, and reads nothing any more
    }
  }
}

at::Tensor PinnedBuffers::take(int64_t numel, const at::Tensor& like) {
  const auto bytes = numel * static_cast<int64_t>(like.element_size());
  const auto fits = [bytes](const Buffer& buffer) {
    return !buffer.taken && buffer.bytes.numel() >= bytes && (!buffer.sent || buffer.sent->query());
  };
  auto found = std::find_if(buffers_.begin(), buffers_.end(), fits);
  if (found == buffers_.end()) {
    // Smaller memory that is not in use makes room.
    const auto idle = [](const Buffer& buffer) {
      return !buffer.taken && (!buffer.sent || buffer.sent->query());
    };
    buffers_.erase(std::remove_if(buffers_.begin(), buffers_.end(), idle), buffers_.end());
    const auto options = at::TensorOptions().dtype(at::kByte).pinned_memory(true);
    buffers_.push_back({at::empty({bytes}, options), false, nullptr});
    found = buffers_.end() - 1;
  }
  found->taken = true;
  found->sent = nullptr;
  return found->bytes.narrow(0, 0, bytes).view(like.scalar_type());
}

PinnedBuffers::Buffer& PinnedBuffers::owner_of(const at::Tensor& part) {
  const auto owns = [&](const Buffer& buffer) {
    const auto* begin = begin_of(buffer.bytes);
    return begin_of(part) >= begin && begin_of(part) < begin + buffer.bytes.numel();
  };
  return *std::find_if(buffers_.begin(), buffers_.end(), owns);
}

void PinnedBuffers::send(const at::Tensor& part, at::Tensor to) {
  to.copy_(part, true);
  auto sent = std::make_shared<c10::Event>(to.device().type());
  sent->record(current_stream(to.device()));
  owner_of(part).sent = std::move(sent);
}

void PinnedBuffers::clear() {
  for (auto& buffer : buffers_) buffer.taken = false;
}

}  // namespace tessera::comm
