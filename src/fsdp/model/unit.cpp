#include "fsdp/model/unit.h"

#include <algorithm>
#include <utility>

#include "comm/execution/diverged.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"

namespace tessera::fsdp {

bool OwnPart::is_replaced(size_t member) const {
  const auto& now = shards[member].tensor;
  const auto& window = windows[member];
  return now.storage().unsafeGetStorageImpl() != window.storage().unsafeGetStorageImpl() ||
         now.storage_offset() != window.storage_offset() || now.sizes() != window.sizes();
}

at::Tensor FlatParameter::gradient_window(size_t member) const {
  const auto& shard = shards[member];
  return sharding::window(gradients.own_segment, shard.at, shard.tensor);
}

at::Tensor FlatParameter::shard_gradient(size_t member) const {
  if (!gradients.page) return gradient_window(member);
  const sharding::NoDetection no_detection;
  const auto& shard = shards[member];
  return sharding::window(gradients.page->flat(), shard.at, shard.tensor);
}

int64_t Unit::gathered_bytes() const {
  int64_t bytes = 0;
  for (const auto& flat : flats) bytes += flat.permanent ? 0 : flat.gathered_bytes();
  return bytes;
}

uint64_t Unit::versions() const {
  uint64_t sum = 0;
  for (const auto& flat : flats)
    for (const auto& shard : flat.shards)
      sum += shard.tensor.unsafeGetTensorImpl()->version_counter().current_version();
  return sum;
}

bool Unit::has_gradients() const {
  for (const auto& flat : flats) {
    for (const auto& shard : flat.shards)
      if (shard.tensor.grad().defined()) return true;
  }
  return false;
}

bool Unit::is_stale() const {
  if (versions() != forward_versions) return true;
  for (const auto& flat : flats) {
    for (size_t m = 0; m < flat.shards.size(); ++m)
      if (flat.is_replaced(m)) return true;
  }
  return false;
}

bool Unit::on_host() const {
  return std::any_of(flats.begin(), flats.end(), [](const auto& flat) { return flat.on_host(); });
}

void Unit::gather(int rank, const sharding::Lanes& lanes, size_t& turn,
                  const comm::CommStream& stream, bool diverged) {
  at::NoGradGuard no_grad;
  const auto tag = "gather of unit " + display_name();
  const comm::CommStream::Scope on_comm_stream(stream);
  for (auto& flat : flats) {
    if (flat.permanent) continue;
    auto& view = flat.compute;
    if (!view.gathered.defined()) view.gathered = flat.common;
    if (!view.gathered.defined()) {
      const auto numel = flat.layout.numel();
      view.gathered = diverged ? view.slots->take_private(numel) : view.slots->take(numel);
      auto shard = flat.own_segment;
      // libtorch converts on the host, into memory for whose copy the host waits.
      if (flat.on_host() && flat.dtype() != view.dtype)
        shard = shard.to(flat.device, /*non_blocking=*/true);
      flat.part_of(view.gathered, rank).copy_(shard, true);
    }
    auto group = lanes.group(turn++);
    if (group.size() > 1)
      view.gather = group.all_gather_async(view.gathered, flat.layout.counts(), tag);
  }
  mark = stream.mark();
  state = State::gathering;
  changed = reduced;  // the values are of before the optimizer's step
  gathered_versions = versions();
}

void Unit::finish(const comm::CommStream& stream) {
  if (state != State::gathering) return;
  for (auto& flat : flats) flat.compute.gather.wait();
  stream.join(mark);
  for (auto& flat : flats) {
    if (!flat.permanent) flat.compute.page->attach(flat.compute.gathered);
    flat.compute.gather = Work();
  }
  state = State::resident;
}

void Unit::settle(const comm::CommStream& stream) {
  if (state == State::resident) return;
  bool gathered = state == State::gathering;
  for (auto& flat : flats) {
    try {
      flat.compute.gather.wait();
    } catch (const comm::Diverged&) {
      gathered = false;
    }
  }
  if (gathered) return finish(stream);
  for (auto& flat : flats) {
    flat.compute.gather = Work();
    const auto memory = std::exchange(flat.compute.gathered, at::Tensor());
    if (memory.defined() && flat.compute.slots) flat.compute.slots->give(memory);
  }
  state = State::released;
}

void Unit::release(const comm::CommStream& stream) {
  if (state == State::released) return;
  finish(stream);
  for (auto& flat : flats) {
    if (flat.permanent) continue;
    flat.compute.page->detach();
    const auto memory = std::exchange(flat.compute.gathered, at::Tensor());
    if (flat.compute.slots) flat.compute.slots->give(memory);
  }
  state = State::released;
}

void Unit::note_versions() {
  const auto now = versions();
  if (std::exchange(forward_versions, now) == now) return;
  for (const auto& flat : flats) {
    if (flat.permanent) continue;  // parameter and shard have one version
    for (const auto& parameter : flat.parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace tessera::fsdp
