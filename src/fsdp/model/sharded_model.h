#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "fsdp/model/unit.h"
#include "sharding/gradients/backward_watch.h"
#include "sharding/named_tensor.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/fully_sharded_data_parallel.h"

// The data of a sharded model: the units and their parameters, the layout of each unit in flat
// buffers, and this rank's part.

namespace tessera::fsdp {

/// Name of the component in messages.
inline constexpr const char* kName = "FullyShardedDataParallel";

struct ShardedModel {
  /// Replaced shards get their own memory again, with their new values. UsageError for another
  /// shape.
  void take_back_shards();
  size_t index_of(const Unit& unit) const { return &unit - units.data(); }

  std::vector<sharding::NamedTensor> parameters;
  std::vector<Unit> units;            ///< The root first.
  std::vector<FlatParameter*> flats;  ///< Those of all units.
  struct Place {
    FlatParameter* flat = nullptr;
    size_t member = 0;
  };
  std::vector<Place> places;  ///< One for each parameter.
  struct Buffer {
    at::Tensor tensor;
    at::ScalarType own;  ///< Its dtype at construction.
  };
  std::vector<Buffer> buffers;  ///< Floating-point buffers only.
  sharding::WrappedParameters wrapped;
  /// `shard_group`: the ranks that hold one copy of the model together. `replicas`: the ranks that
  /// hold the same shards as this rank.
  ProcessGroup world, shard_group, replicas;
  /// The shard group of gathers for forward and backward: see [Note: lanes].
  sharding::Lanes gathers;

  /// Of everything that changes in forward and backward. Recursive, because hooks of the program
  /// on shards run under it and may use parameters.
  std::unique_ptr<std::recursive_mutex> mutex = std::make_unique<std::recursive_mutex>();

  sharding::OwnedShard& shard_of(size_t parameter) const {
    return places[parameter].flat->shards[places[parameter].member];
  }
  /// One for each member of each flat parameter.
  std::vector<const sharding::OwnedShard*> shards() const;
  /// Of the trainable parameters; null while they are made.
  std::unique_ptr<sharding::BackwardWatch> watch;
  bool diverged = false, has_diverged = false;  ///< Now, ever; see [Note: divergence].
  /// After comm::Diverged in one group: the ranks of the shard group diverge. Collective.
  void diverge();
  /// Where ranks of `group` have diverged, all of them call this. Each of them then has seen it,
  /// and the next collectives are compared as before. Collective.
  static void meet(ProcessGroup& group);
  /// True if a unit's shards are in common memory: see [Note: shards in common memory].
  bool shares_memory() const;
  at::Device device() const { return flats.empty() ? at::kCPU : flats[0]->device; }
};

/// Divides `module` into units and this rank's shards. Collective.
ShardedModel build_sharded_model(torch::nn::Module& module, ProcessGroup group,
                                 const FullyShardedDataParallelOptions& options);

/// Gives the shards the values of the module's parameters. `from_rank0`: those of rank 0.
/// Collective.
void fill_shards(ShardedModel& model, bool from_rank0);

/// Converts the floating-point buffers to `dtype`; unset: to their own dtype.
void convert_buffers(ShardedModel& model, const std::optional<at::ScalarType>& dtype);

}  // namespace tessera::fsdp
