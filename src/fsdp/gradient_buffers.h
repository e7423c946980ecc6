#pragma once

#include "fsdp/model/sharded_model.h"
#include "sharding/gradients/gradient_placement.h"

namespace tessera::fsdp {

/// The flat buffers of unsharded gradients. Each gradient is computed in the flat buffer of its
/// unit or, where that was not predicted, copied to it when it arrives.
class GradientBuffers {
 public:
  GradientBuffers(ShardedModel& model, FsdpStats& stats);

  void begin_backward();
  /// `learn`: the backward reached its end, so it predicts the next one.
  void end_backward(bool learn) { placement_.end(learn); }
  /// `flat`, which has no buffer, gets one.
  void begin(FlatParameter& flat);
  /// True if gradients of some member may be computed in the flat buffer.
  bool has_windows(const FlatParameter& flat) const;
  /// Moves `.grad` of a parameter of the module to the flat buffer, unless it is there already.
  /// `computed`: the tensor that autograd stored there; undefined if it is not known.
  void take(FlatParameter& flat, size_t member, const at::Tensor& computed);
  /// If other tensors use memory of the flat buffer, by a wrong prediction, the gradients move to a
  /// private one.
  void displace(FlatParameter& flat);
  /// The flat buffer is no longer that of `flat`.
  void forget(FlatParameter& flat);
  /// The members in `has` have gradients in `slot` again, whose reduction was not made.
  void take_back(FlatParameter& flat, const at::Tensor& slot, const std::vector<char>& has);
  /// Drops the gradients that are accumulated and not reduced.
  void drop(FlatParameter& flat);

 private:
  bool has_window(const FlatParameter& flat, size_t member) const;

  ShardedModel& model_;
  FsdpStats& stats_;
  sharding::GradientPlacement placement_;
};

/// See FlatGradients::defer_until_complete.
bool is_mostly_one_parameter(const FlatParameter& flat);

/// [Note: large parameters] A parameter of 64 MiB or more that is most of its unit (a tied
/// embedding) determines the peak of a rank's memory. If it is tied, its whole gradient exists
/// during the whole backward. So memory without gradients is returned to the system:
/// - that of the shards' gradients from the forward before which they were cleared,
/// - what backward has freed, while the last units are left, which is when most gradients of shards
///   are there,
/// - the flat buffers of other units, from the last two on,
/// - the gradient's own memory as it moves, if nothing else uses it,
/// - the flat buffer once it is reduced.
/// The cost is page faults in the next step.
bool is_large(const FlatParameter& flat);
bool has_large(const ShardedModel& model);

/// The unreduced flat parameters of this backward.
struct Unreduced {
  size_t small = 0, large = 0;
  /// Few are left, so their reductions do not overlap the next one.
  bool few() const { return small <= 2; }
};
Unreduced unreduced(const ShardedModel& model);

/// Returns the memory of free slots to the system.
void return_free_slots(const ShardedModel& model);
/// Returns the memory of gradients of shards that were cleared.
void return_cleared(const ShardedModel& model);

}  // namespace tessera::fsdp
