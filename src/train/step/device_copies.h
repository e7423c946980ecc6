#pragma once

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/data/dataset.h"

namespace tessera::train {

/// Copies batches to a device through pinned memory, so that the host does not wait for it. Pinned
/// memory is kept until the device has read it.
class DeviceCopies {
 public:
  DeviceCopies() = default;
  DeviceCopies(const DeviceCopies&) = delete;
  DeviceCopies& operator=(const DeviceCopies&) = delete;
  /// Waits until the device has read all of it.
  ~DeviceCopies() {
    try {
      while (!read_all()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } catch (...) {  // the device has an error, and reads nothing any more
    }
  }

  /// The batch with all its tensors, also the extra ones, on `device`.
  Batch to_device(Batch batch, const at::Device& device) {
    if (device.is_cpu()) return batch;
    read_all();
    sent_.emplace_back();
    batch.inputs = copy(batch.inputs, device);
    if (batch.targets.defined()) batch.targets = copy(batch.targets, device);
    for (auto& [name, tensor] : batch.extra) tensor = copy(tensor, device);
    sent_.back().read = std::make_shared<c10::Event>(device.type());
    sent_.back().read->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return batch;
  }

 private:
  struct Sent {
    std::vector<at::Tensor> pinned;
    std::shared_ptr<c10::Event> read;  // null: a copy of the batch has failed
  };

  /// Frees the batches that the device has read. Returns true if these are all.
  bool read_all() {
    const auto is_read = [](const Sent& sent) { return !sent.read || sent.read->query(); };
    sent_.erase(std::remove_if(sent_.begin(), sent_.end(), is_read), sent_.end());
    return sent_.empty();
  }

  at::Tensor copy(const at::Tensor& tensor, const at::Device& device) {
    if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !can_pin()) return tensor.to(device);
    const auto options = tensor.options().pinned_memory(true);
    sent_.back().pinned.push_back(at::empty_like(tensor, options).copy_(tensor));
    return sent_.back().pinned.back().to(device, /*non_blocking=*/true);
  }

  /// True if libtorch has pinned memory for the accelerator; some types have none.
  static bool can_pin() {
    static const bool result = [] {
      try {
        return at::empty({1}, at::TensorOptions().pinned_memory(true)).defined();
      } catch (const c10::Error&) {
        return false;
      }
    }();
    return result;
  }

  std::vector<Sent> sent_;
};

/// The numbers in tensors of one element. The host waits once for all that are on a device.
inline std::vector<double> read_figures(
    const std::vector<std::pair<std::string, at::Tensor>>& figures) {
  std::vector<at::Tensor> on_device;
  for (const auto& [name, value] : figures)
    if (!value.is_cpu()) on_device.push_back(value.detach().to(at::kDouble).reshape({}));
  at::Tensor read;
  if (!on_device.empty()) read = at::stack(on_device).cpu();
  std::vector<double> numbers;
  int64_t next = 0;
  for (const auto& [name, value] : figures)
    numbers.push_back(value.is_cpu() ? value.item<double>() : read[next++].item<double>());
  return numbers;
}

}  // namespace tessera::train
