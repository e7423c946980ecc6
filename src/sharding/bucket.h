#pragma once

#include <vector>

#include <torch/torch.h>

#include "sharding/layout.h"

namespace tessera::sharding {

/// The flat storage of one layout, one dtype, one device, with the tensors as views into it.
struct Bucket {
  std::vector<size_t>
      members;  ///< Indices of the tensors in their owner's list, in the layout's order.
  Layout layout;
  at::Tensor flat;  ///< [layout.numel()]
  std::vector<at::Tensor>
      views;  ///< One a member: its run of `flat`, with the member's shape and strides.
  size_t lane =
      0;  ///< Buckets of one lane are complete in order; lanes do not wait for each other.

  int64_t bytes() const { return flat.numel() * flat.element_size(); }
};

/// A window of `flat` that looks like `like`: same shape, same strides where like is dense, else
/// contiguous. Not an autograd view, so that it can be a gradient or a parameter's data.
at::Tensor window(const at::Tensor& flat, int64_t offset, const at::Tensor& like);

/// `window` becomes `gradient`. What goes to a bucket is read again when the bucket is complete: a
/// large one is written past the caches.
void place(const at::Tensor& gradient, const at::Tensor& window);

/// A one-dimensional window, in memory order.
at::Tensor window(const at::Tensor& flat, int64_t offset, int64_t numel);

/// `tensor`'s elements in memory order, one-dimensional: an alias where the tensor is dense, else a
/// copy.
at::Tensor in_memory_order(const at::Tensor& tensor);

/// The same in the memory order of `like`, which has `tensor`'s shape: an alias where both are
/// stored alike, else a copy.
at::Tensor in_memory_order(const at::Tensor& tensor, const at::Tensor& like);

/// Fills in `views` for `members` of `tensors` over `flat`.
Bucket make_bucket(std::vector<size_t> members, Layout layout, at::Tensor flat,
                   const std::vector<at::Tensor>& tensors);

}  // namespace tessera::sharding
