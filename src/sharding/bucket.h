#pragma once

#include <vector>

#include <torch/types.h>

#include "sharding/layout.h"
#include "tessera/optim/state_slice.h"

namespace tessera::sharding {

/// Tensors of one dtype and device in one flat buffer.
struct Bucket {
  /// Indices of the tensors in their owner's list, in the layout's order.
  std::vector<size_t> members;
  Layout layout;
  /// The flat buffer, [layout.numel()].
  at::Tensor flat;
  /// One window a member: its elements in `flat`, with the member's shape and strides.
  std::vector<at::Tensor> views;
  /// Buckets of one lane become complete in order; lanes do not wait for each other.
  size_t lane = 0;

  int64_t bytes() const { return flat.numel() * flat.element_size(); }
};

/// A window of `flat` from element `offset` on, with the shape of `like`, and its strides if `like`
/// is dense; otherwise contiguous. Not an autograd view, so it can be a gradient or a parameter's
/// data.
at::Tensor window(const at::Tensor& flat, int64_t offset, const at::Tensor& like);

/// Copies `gradient` to `window`. A bucket is read only when it is complete, so a large gradient is
/// written past the caches.
void place(const at::Tensor& gradient, const at::Tensor& window);

/// As place(), but returns the memory of `gradient` to the system as it is copied, so that the
/// gradient is in memory once. Nothing may read its values afterwards.
void move_to(const at::Tensor& gradient, const at::Tensor& window);

/// A one-dimensional window of `numel` elements, in memory order.
at::Tensor window(const at::Tensor& flat, int64_t offset, int64_t numel);

/// The elements of `tensor` in memory order, one-dimensional: an alias if the tensor is dense,
/// otherwise a copy.
at::Tensor in_memory_order(const at::Tensor& tensor);

/// The same in the memory order of `like`, which has the shape of `tensor`: an alias if both have
/// the same strides, otherwise a copy.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like);

/// A tensor without memory that has the shape and the memory order of `range`, for use as `like`.
/// `range` must state its strides.
at::Tensor order_of(const ElementRange& range);

/// Frees the memory of `flat`, a bucket; its values are unspecified then. On the CPU the system
/// gets the whole pages, and the next write gets new ones. On a device the allocator gets all of
/// it, and no view has memory until ensure_memory().
void release_memory(const at::Tensor& flat);
/// Memory of unspecified values from the device's allocator, if there is none.
void ensure_memory(const at::Tensor& flat);

/// A bucket over `flat` whose members are `members`, indices into `tensors`.
Bucket make_bucket(std::vector<size_t> members, Layout layout, at::Tensor flat,
                   const std::vector<at::Tensor>& tensors);

}  // namespace tessera::sharding
