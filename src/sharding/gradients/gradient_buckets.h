#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/types.h>

#include "sharding/bucket.h"
#include "sharding/detection/arriving_pages.h"
#include "sharding/detection/local_norms.h"
#include "sharding/gradients/gradient_placement.h"
#include "sharding/named_tensor.h"

namespace tessera::sharding {

/// The memory of gradients: buckets, and the window of each parameter's gradient in them.
///
/// A bucket is in one of two states, which say where its gradients are:
///   - home: in the memory that the bucket was made with, which peers read in place where ranks
///     share memory. Nothing else is allocated.
///   - displaced: another tensor was placed in a window by a wrong prediction (see
///     [Note: gradients in place]) and keeps that memory. The gradients are in private memory of
///     the same size until that tensor is freed. Collectives then copy; results are the same.
/// All members are local. Not between threads: the owner locks.
class GradientBuckets {
 public:
  /// `as_views`: gradients become windows of their bucket. Otherwise they are copied in and out.
  /// `component` and `rank` are for error messages. `refuse_own_norm`: throws the error of clipping
  /// by the norm of the `.grad`s, which belong to this rank alone; needs `as_views`. Empty: such
  /// clipping is allowed. See [Note: norms of one rank]. `in_background`: arrives_with() may be
  /// called; needs `as_views`, no `refuse_own_norm`, and start_detection().
  GradientBuckets(std::string component, int rank, std::vector<NamedTensor> parameters,
                  bool as_views, std::function<void()> refuse_own_norm, bool in_background = false);
  ~GradientBuckets();

  /// Replaces all buckets, between backwards. `buckets` cover each parameter once. Gradients that
  /// exist move over.
  void set(std::vector<Bucket> buckets);

  const std::vector<Bucket>& all() const { return buckets_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  size_t bucket_of(size_t parameter) const { return where_[parameter].bucket; }
  std::vector<size_t> buckets_of_parameters() const;
  bool as_views() const { return as_views_; }

  /// Between backwards: displaced buckets whose home memory is free again return to it.
  void restore();
  /// A backward has begun on this thread: its allocations are watched and predicted.
  void begin_backward();
  /// The backward is over. `learn`: it reached its end, so the next one is predicted from it.
  void end_backward(bool learn) { placement_.end(learn); }

  /// Autograd has finished `.grad` of the parameter: notes it for the next prediction, and, where
  /// gradients are windows or `copy` is set, puts it into the bucket. `computed` is the tensor that
  /// autograd stored in `.grad` or added to it.
  void store(size_t parameter, const at::Tensor& computed, bool copy);
  /// The same for a gradient of an earlier backward that has not been put into the bucket.
  void store_late(size_t parameter);
  /// The parameter has no gradient: its window counts as zero.
  void zero(size_t parameter);
  /// Called before a collective reads the bucket: afterwards no other tensor is in its memory.
  void prepare(size_t bucket);
  /// `.grad` of the parameter becomes its window's values.
  void return_gradient(size_t parameter);

  /// `collective`, which writes the bucket, has begun. Until the collective is complete the
  /// bucket's gradients have no memory, and the first operator that takes one waits for it. See
  /// [Note: pages that arrive in the background].
  void arrives_with(size_t bucket, Work collective);
  /// All these collectives are complete, or BrokenWorldError. Blocks. From any thread.
  void wait_for_arrivals();

  /// See LocalNorms; empty where norms of the gradients are allowed.
  std::vector<char> take_scales() { return norms_ ? norms_->take_scales() : std::vector<char>(); }
  /// The owner of the buckets' pages; null unless `in_background`.
  ArrivingPages* arriving() { return arriving_.get(); }

  /// `.grad` of every parameter becomes undefined, or zero where `set_to_none` is false.
  void zero_grad(bool set_to_none);

  /// `.grad` of the bucket's parameters becomes undefined.
  void forget(size_t bucket);

  /// A collective has overwritten the parameter's gradient: it must be cleared before a backward
  /// adds to it.
  void mark_overwritten(size_t parameter);
  /// Name of a parameter whose gradient was overwritten and has not been cleared since; "" for
  /// none.
  std::string uncleared();

 private:
  struct Place {
    size_t bucket = 0, member = 0;
  };
  /// The `.grad` that was overwritten, and its version then.
  struct Overwritten {
    at::Tensor gradient;
    uint32_t version = 0;
  };
  struct Home {
    Bucket bucket;
    std::unique_ptr<Page> page;
  };

  std::vector<at::Tensor> tensors() const;
  at::Tensor& gradient(size_t parameter) { return parameters_[parameter].tensor.mutable_grad(); }
  const at::Tensor& window(size_t parameter) const;
  const at::Tensor& writable_window(size_t parameter);
  bool holds_other_tensor(size_t parameter) const;
  void displace(size_t bucket);
  bool is_cleared(size_t parameter, const at::Tensor& arrived);
  std::unique_ptr<Page> put_on_page(size_t index, Bucket& bucket);
  std::set<LocalNorms::Gradient> gradients();

  std::string component_;
  int rank_;
  std::vector<NamedTensor> parameters_;
  bool as_views_;
  // At most one of the two owns the pages of the buckets.
  std::unique_ptr<LocalNorms> norms_;
  std::unique_ptr<ArrivingPages> arriving_;
  std::vector<Bucket> buckets_;
  std::vector<std::unique_ptr<Page>> pages_;  // of the buckets, if they have an owner
  std::vector<Place> where_;
  GradientPlacement placement_;
  std::map<size_t, Home> homes_;  // of displaced buckets
  // The tensor that was placed in this window is the gradient itself, and only autograd holds it
  // until the hook returns.
  std::vector<char> placed_gradient_;
  static constexpr size_t kNone = static_cast<size_t>(-1);
  std::map<size_t, Overwritten> overwritten_;
  size_t stale_ = kNone;  // a parameter whose overwritten gradient a backward has added to
};

}  // namespace tessera::sharding
