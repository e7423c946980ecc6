#include "sharding/bucket.h"

#include <algorithm>

#include <c10/core/DeviceGuard.h>

#include "comm/shm/shm_kernels.h"
#include "memory/heap.h"
#include "tessera/detail/resolved.h"

namespace tessera::sharding {

at::Tensor window(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  at::AutoDispatchBelowADInplaceOrView no_views;
  if (like.is_non_overlapping_and_dense())
    return flat.as_strided(like.sizes(), like.strides(), flat.storage_offset() + offset);
  return flat.narrow(0, offset, like.numel()).view(like.sizes());
}

namespace {

/// True if equal bytes are equal values.
bool same_form(const at::Tensor& gradient, const at::Tensor& window) {
  return gradient.layout() == at::kStrided && gradient.device().is_cpu() &&
         window.device().is_cpu() && detail::is_resolved(gradient) &&
         gradient.scalar_type() == window.scalar_type() && gradient.sizes() == window.sizes() &&
         gradient.strides() == window.strides() && window.is_non_overlapping_and_dense();
}

}  // namespace

void move_to(const at::Tensor& gradient, const at::Tensor& window) {
  constexpr int64_t kStep = 8 << 20;  // bytes
  if (!same_form(gradient, window)) return place(gradient, window);
  auto* const from = static_cast<std::byte*>(gradient.data_ptr());
  auto* const to = static_cast<std::byte*>(window.data_ptr());
  const auto bytes = static_cast<int64_t>(window.nbytes());
  for (int64_t at = 0; at < bytes; at += kStep) {
    const int64_t n = std::min(kStep, bytes - at);
    comm::copy_bytes(to + at, from + at, n);
    memory::return_pages(from + at, n);
  }
}

void place(const at::Tensor& gradient, const at::Tensor& window) {
  if (!same_form(gradient, window)) {
    window.copy_(gradient);
    return;
  }
  comm::copy_bytes(static_cast<std::byte*>(window.data_ptr()),
                   static_cast<const std::byte*>(gradient.data_ptr()),
                   static_cast<int64_t>(window.nbytes()));
}

at::Tensor window(const at::Tensor& flat, int64_t offset, int64_t numel) {
  at::AutoDispatchBelowADInplaceOrView no_views;
  return flat.narrow(0, offset, numel);
}

at::Tensor in_memory_order(const at::Tensor& tensor) {
  at::AutoDispatchBelowADInplaceOrView no_views;
  if (tensor.is_contiguous()) return tensor.view({-1});
  if (tensor.is_non_overlapping_and_dense()) return tensor.as_strided({tensor.numel()}, {1});
  return tensor.contiguous().view({-1});
}

at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.strides() == like.strides()) return in_memory_order(tensor);
  if (!like.is_non_overlapping_and_dense()) return in_memory_order(tensor.contiguous());
  return in_memory_order(
      at::empty_strided(like.sizes(), like.strides(), tensor.options()).copy_(tensor));
}

at::Tensor order_of(const ElementRange& range) {
  return at::empty_strided(range.shape, range.strides, at::TensorOptions().device(at::kMeta));
}

void release_memory(const at::Tensor& flat) {
  if (flat.device().is_cpu())
    return memory::return_pages(flat.data_ptr(), static_cast<int64_t>(flat.nbytes()));
  flat.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(at::DataPtr(nullptr, flat.device()));
}

void ensure_memory(const at::Tensor& flat) {
  if (flat.device().is_cpu() || flat.numel() == 0 || flat.data_ptr() != nullptr) return;
  const c10::DeviceGuard own(flat.device());
  auto* const storage = flat.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(
      c10::GetAllocator(flat.device().type())->allocate(storage->nbytes()));
}

Bucket make_bucket(std::vector<size_t> members, Layout layout, at::Tensor flat,
                   const std::vector<at::Tensor>& tensors) {
  Bucket bucket{std::move(members), std::move(layout), std::move(flat), {}, 0};
  for (size_t i = 0; i < bucket.members.size(); ++i) {
    bucket.views.push_back(
        window(bucket.flat, bucket.layout.offset(i), tensors[bucket.members[i]]));
  }
  return bucket;
}

}  // namespace tessera::sharding
