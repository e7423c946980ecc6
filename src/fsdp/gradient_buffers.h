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
  /// Whether gradients of some member may be computed in the flat buffer.
  bool has_windows(const FlatParameter& flat) const;
  /// Moves `.grad` of a parameter of the module to the flat buffer, unless it is there already.
  /// `computed`: the tensor that autograd stored there; undefined if it is not known.
  void take(FlatParameter& flat, size_t member, const at::Tensor& computed);
  /// If other tensors use memory of the flat buffer, by a wrong prediction, the gradients move to a
  /// private one.
  void displace(FlatParameter& flat);
  /// The flat buffer is no longer that of `flat`.
  void forget(FlatParameter& flat);
  /// Drops the gradients that are accumulated and not reduced.
  void drop(FlatParameter& flat);

 private:
  bool has_window(const FlatParameter& flat, size_t member) const;

  ShardedModel& model_;
  FsdpStats& stats_;
  sharding::GradientPlacement placement_;
};

}  // namespace tessera::fsdp
