#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/bucket.h"
#include "sharding/named_tensor.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

struct ReducerOptions {
  std::string component;  ///< For messages.
  /// Parameters may get no gradient in a backward. Those that no rank used keep theirs; those that
  /// some rank used count as zero on the others. Off, a missing gradient is an error on every rank.
  bool find_unused_parameters = false;
  /// The same parameters get gradients the same number of times in every backward: learned in the
  /// first, no exchange of who was used afterwards.
  bool static_graph = false;
  /// The caller finds out by itself which parameters were used; has_gradient() tells it this rank's
  /// part.
  bool caller_tracks_use = false;
  /// Gradients become windows of their bucket; else they are copied in and out.
  bool gradient_as_bucket_view = true;
};

/// Notices gradients as backward produces them, puts them into buckets, and tells when a bucket is
/// complete: always in the order of the buckets (of a lane), whatever the order of arrival, so that
/// all ranks start the same collectives in the same order. What is then done with the bucket is the
/// caller's: see `Callbacks`. Follows DDP's reducer (Li et al., 2020).
class Reducer {
 public:
  struct Callbacks {
    /// Bucket `index` is complete on this rank: start its collective. Called from within backward,
    /// in order.
    std::function<void(size_t index)> ready;
    /// All buckets were started and backward is over: wait for them.
    std::function<void()> finish;
    /// Optional. A backward threw, and buckets are about to be filled again: wait for what it had
    /// started.
    std::function<void()> drain = {};
  };

  /// `buckets` cover each of `parameters` once; all of these are trainable. Local.
  Reducer(ProcessGroup group, std::vector<NamedTensor> parameters, std::vector<Bucket> buckets,
          ReducerOptions options, Callbacks callbacks);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Off: gradients accumulate locally and nothing is started until it is on again in a later
  /// backward, or flush().
  void set_sync(bool sync);
  bool sync() const;

  /// Starts and finishes everything outside a backward, with the gradients that have accumulated.
  /// Collective.
  void flush();

  /// As flush(), for a rank without data while the others are in a backward: lets go of its
  /// gradients and counts as zero. Parameters that the others used get the result.
  void shadow();

  /// Takes `buckets` instead, between backwards; gradients that accumulated move over.
  void replace_buckets(std::vector<Bucket> buckets);
  const std::vector<Bucket>& buckets() const;

  /// Parameters in the order in which the last synchronising backward produced their gradients;
  /// those without one last.
  std::vector<size_t> arrival_order() const;
  /// Those that have arrived in the backward under way. In `ready` and `finish`.
  const std::vector<size_t>& arrived() const;
  /// Whether any rank had a gradient for the parameter when buckets were last started.
  bool used(size_t parameter) const;

  /// Whether this rank has a gradient for it, in `ready` and `finish`.
  bool has_gradient(size_t parameter) const;

  /// caller_tracks_use: in `finish`, some rank had a gradient for it, so this rank gets the result
  /// too.
  void set_used(size_t parameter);

  /// Grows with every gradient that arrives.
  uint64_t generation() const;

  /// Lets go of all gradients: `.grad` of every parameter becomes undefined, or zero where
  /// `set_to_none` is false.
  void zero_grad(bool set_to_none);

  class Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera::sharding
