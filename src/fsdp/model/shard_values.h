#pragma once

#include "fsdp/model/sharded_model.h"
#include "fsdp/model/unit_plan.h"

// Values of shards, buffers and ignored parameters at construction. All functions are collective.
// `from_rank0`: all ranks get the values of rank 0.

namespace tessera::fsdp {

/// Gives the shards the values of the module's parameters.
void fill_shards(ShardedModel& model, bool from_rank0);
/// The buffers are whole on every rank.
void share_buffers(torch::nn::Module& module, ProcessGroup& group, bool from_rank0);
/// An ignored parameter keeps its memory.
void materialize_ignored(const torch::nn::Module& module, const UnitPlan& plan,
                         const ProcessGroup& group);

}  // namespace tessera::fsdp
