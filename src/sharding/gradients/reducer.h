#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "sharding/gradients/arrival_tracker.h"
#include "sharding/gradients/backward_watch.h"
#include "sharding/gradients/gradient_buckets.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

struct ReducerOptions {
  std::string component;  ///< Name of the owner, for messages.
  /// Reduction is part of backward: start() and finish() are called from within it. False: backward
  /// only fills buckets, and the owner calls collect().
  bool reduce_in_backward = true;
  /// Without reduce_in_backward, with find_unused_parameters and gradient_as_bucket_view. True:
  /// between open_round() and collect(), each bucket is reported through start() once, on every
  /// rank: within the first backward that is not held, or else in collect(). Gradients may change
  /// afterwards; changed() tells.
  bool provisional = false;
  /// A parameter may get no gradient in a backward. A parameter that no rank used keeps its
  /// gradient. A parameter that some ranks used counts as zero on the others. False: a missing
  /// gradient is an error on every rank.
  bool find_unused_parameters = false;
  /// Each parameter gets a gradient the same number of times in every backward. The first backward
  /// determines the numbers, and only then do the ranks exchange the used parameters.
  bool static_graph = false;
  bool offers_static_graph = false;  ///< The owner has that option, for messages.
  /// The owner itself determines the parameters that any rank used, with has_gradient() for this
  /// rank's part, and calls set_used().
  bool caller_tracks_use = false;
  /// Gradients become windows of their bucket; otherwise they are copied in and out.
  bool gradient_as_bucket_view = true;
  /// finish() need not wait for the buckets: it may call arrives_with() for them. Needs
  /// gradient_as_bucket_view, no own_norm, and start_detection().
  bool in_background = false;
  /// ReductionPolicy::begin() is called before autograd changes any `.grad`. Costs one more hook
  /// for each parameter.
  bool begin_before_first = false;
  /// The text of the error for a gradient that mark_overwritten() was called for.
  std::string overwritten =
      "was already averaged and used by an earlier step; expected zero_grad() between step() and "
      "the next backward";
  /// Not empty: until the owner reduces it, a gradient belongs to this rank alone, so clipping by a
  /// norm of the gradients is an error on every rank, with this text. Needs
  /// gradient_as_bucket_view.
  std::string own_norm = {};
};

/// The treatment of the buckets of a Reducer, by its owner.
class ReductionPolicy {
 public:
  virtual ~ReductionPolicy() = default;
  /// With ReducerOptions::begin_before_first, a backward has begun. In the thread of the first
  /// gradient.
  virtual void begin() {}
  /// Bucket `index` is complete on this rank: start its collective. From within backward, in order.
  virtual void start(size_t index) = 0;
  /// All buckets were started and backward is over: wait for them.
  virtual void finish() {}
  /// `.grad`s have their values: the buckets may be replaced.
  virtual void finished() {}
  /// A backward threw, or in_background is set, and buckets are about to be filled again: wait for
  /// the collectives that were started.
  virtual void abandon() {}
  /// With provisional, in collect(): true if this rank's gradients in bucket `index` have changed
  /// since start().
  virtual bool changed(size_t /*index*/) { return false; }
};

/// Receives gradients as backward produces them, puts them into buckets, and reports when a bucket
/// is complete. The reports come in the order of the buckets (of a lane), independent of the order
/// of arrival, so that all ranks start the same collectives in the same order. The owner decides
/// what happens to a bucket. Follows DDP's reducer (Li et al., 2020).
///
/// Between backwards each gradient is in one of three states:
///   - absent: `.grad` is undefined; the window's contents do not matter.
///   - stored: `.grad` is a window of the bucket (or has been copied there), this rank's own sum.
///   - used up: a collective has overwritten the window; see mark_overwritten().
class Reducer {
 public:
  /// `buckets` cover each of `parameters` once; all parameters are trainable. `policy` lives
  /// longer; null where neither reduce_in_backward nor provisional is set. Local.
  Reducer(ProcessGroup group, std::vector<NamedTensor> parameters, std::vector<Bucket> buckets,
          ReducerOptions options, ReductionPolicy* policy);
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Changes the number of reasons to accumulate gradients locally. While there is one, no
  /// collective starts except by flush(). No effect without reduce_in_backward.
  void hold_sync(int change) { holds_ = std::max(0, holds_ + change); }
  bool sync() const { return options_.reduce_in_backward && holds_ == 0; }

  /// With provisional: the buckets must be reported again. Every rank calls it. Local.
  void open_round();
  /// With provisional: reports the buckets that were not reported in this round, whatever they
  /// hold. Every rank calls it.
  void close_round();
  /// With provisional, after collect(): true if bucket `b` has changed on some rank since its
  /// report, or the round was not open.
  bool changed(size_t b) const { return changed_[b]; }

  /// Outside a backward: puts every gradient into its bucket, zeros where this rank has none, and
  /// finds out which parameters any rank used. Afterwards the buckets can be reduced. Collective.
  void collect();
  /// `.grad` of each used parameter becomes its window's values. Local, after collect().
  void return_gradients();

  /// Starts and finishes the reduction of all buckets outside a backward, with the gradients that
  /// have accumulated. Collective.
  void flush();
  /// As flush(), on a rank without data while the other ranks are in a backward: drops its own
  /// gradients and counts as zero. Parameters that other ranks used get the result. Collective.
  void shadow();

  /// Replaces the buckets between backwards; gradients that have accumulated move over. Local.
  void replace_buckets(std::vector<Bucket> buckets);
  const std::vector<Bucket>& buckets() const { return buckets_.all(); }

  /// Parameters in the order in which the last reduced backward produced their gradients;
  /// parameters without one come last.
  std::vector<size_t> arrival_order() const;
  /// Parameters that have arrived in the current backward. For use in start() and finish().
  const std::vector<size_t>& arrived() const { return tracker_.order(); }
  /// True if any rank had a gradient for the parameter in the last reduction.
  bool used(size_t parameter) const { return used_.empty() || used_[parameter]; }
  /// True if this rank has a gradient for the parameter. For use in start() and finish().
  bool has_gradient(size_t parameter) const { return !missing_[parameter]; }
  /// With caller_tracks_use, in finish(): some rank had a gradient, so this rank gets the result.
  void set_used(size_t parameter) { used_[parameter] = true; }

  /// For use in finish(): `collective` writes the gradients of the bucket. The first operator that
  /// takes one waits for it.
  void arrives_with(size_t bucket, Work collective) {
    buckets_.arrives_with(bucket, std::move(collective));
  }
  /// All collectives of arrives_with() are complete, or BrokenWorldError. Local; blocks. From any
  /// thread.
  void wait_for_arrivals() { buckets_.wait_for_arrivals(); }
  /// The owner of the pages of arrives_with(). Null unless in_background.
  ArrivingPages* arriving() { return buckets_.arriving(); }

  /// UsageError on every rank if the gradients of some parameter are no longer reported to this
  /// object; see BackwardWatch::lost_parameter().
  void check_attached();

  /// For use in start(): `.grad` of the parameters in the bucket becomes undefined.
  void forget(size_t bucket) { buckets_.forget(bucket); }
  /// The owner has overwritten the parameter's gradient in its bucket. It must be cleared before
  /// the next backward adds to it.
  void mark_overwritten(size_t parameter) { buckets_.mark_overwritten(parameter); }
  /// UsageError on every rank if an overwritten gradient was used without having been cleared.
  void check_cleared();
  /// `.grad` of every parameter becomes undefined, or zero where `set_to_none` is false. Local.
  void zero_grad(bool set_to_none);

 private:
  /// Buckets of one lane become ready in order; lanes do not wait for each other.
  struct Lane {
    std::vector<size_t> buckets;
    size_t next = 0;
  };
  /// With provisional. open: the next backward that is not held reports buckets. sent: it has, or
  /// collect() has.
  enum class Round { none, open, sent };
  /// The treatment of a parameter without a gradient at the end of a reduction.
  enum class Missing { by_options, zero };

  // Called by the watch.
  void begin();
  void arrive(size_t parameter, const at::Tensor& computed);
  void end();
  void abandon();

  std::function<void()> refuse_own_norm();
  void set_buckets(std::vector<Bucket> buckets);
  void start();
  void reset();
  void start_remaining_buckets();
  void ready(size_t bucket);
  void report_rest();
  bool sends() const { return sync() || (round_ == Round::open && holds_ == 0); }
  std::vector<char> collect_rest(Missing rule, bool zero_now = true);
  void notify_finished();
  void finish_reduction(Missing missing);
  void give_back();
  void learn_static_graph();
  void check_static_graph();
  void exchange_use(const std::vector<char>& have);
  bool may_be_unused() const { return options_.find_unused_parameters || options_.static_graph; }
  size_t size() const { return buckets_.parameters().size(); }
  const std::string& name(size_t i) const { return buckets_.parameters()[i].name; }

  ProcessGroup group_;
  ReducerOptions options_;
  ReductionPolicy* policy_;
  int holds_ = 0;
  bool abandoned_ = false;      // the last backward threw
  bool graph_learned_ = false;  // static_graph: expectations are those of the first backward
  bool use_is_known_ = false;   // static_graph: used_ is that of the first reduction

  // Autograd's threads call arrive(), the thread that called backward the rest.
  std::mutex mutex_;
  GradientBuckets buckets_;
  ArrivalTracker tracker_;
  std::vector<Lane> lanes_;
  Round round_ = Round::none;
  std::vector<char> reported_;  // by bucket, in this round
  std::vector<char> changed_;   // by bucket
  std::vector<char> used_;      // by any rank, in the last reduction
  std::vector<char> missing_;   // on this rank, in the current reduction
  std::vector<size_t> last_order_;
  std::unique_ptr<BackwardWatch> watch_;
};

}  // namespace tessera::sharding
