#pragma once

#include "fsdp/model/sharded_model.h"

namespace tessera::fsdp {

/// [Note: large parameters] A parameter of 64 MiB or more that is most of its unit (a tied
/// embedding) determines the peak of a rank's memory. Its whole gradient is there during the whole
/// backward if it is tied. So the memory of gradients is the system's while it holds none:
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
