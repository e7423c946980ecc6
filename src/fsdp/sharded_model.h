#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/paging/slot_pool.h"
#include "sharding/detection/page.h"
#include "sharding/gradients/lanes.h"
#include "sharding/layout.h"
#include "sharding/named_tensor.h"
#include "sharding/owned_shard.h"
#include "sharding/wrapped_parameters.h"
#include "tessera/fully_sharded_data_parallel.h"

// The data of a sharded model: which parameters form which unit, how each unit is laid out in flat
// buffers, and which part this rank owns.

namespace tessera::fsdp {

/// Name of the component in messages.
inline constexpr const char* kName = "FullyShardedDataParallel";

/// How a flat parameter is gathered for computing in one dtype.
struct ComputeView {
  at::ScalarType dtype = at::kFloat;
  std::unique_ptr<sharding::Page> page;
  SlotPool* slots = nullptr;  ///< Null if the ranks' shards are in common memory.
};

/// The parameters of one unit with the same dtype, device and trainability. They have one flat
/// buffer, one gather and one reduction.
struct FlatParameter {
  size_t unit = 0;
  std::vector<size_t> members;  ///< Indices into ShardedModel::parameters, in the layout's order.
  sharding::Layout layout;
  at::ScalarType dtype = at::kFloat;   ///< Of the shards.
  at::ScalarType reduce = at::kFloat;  ///< Of unsharded gradients.
  at::Device device = at::kCPU;        ///< Of the page.
  bool trainable = true;
  bool permanent = false;  ///< The shards are whole parameters: nothing is gathered or released.

  /// If the ranks share memory and compute in the shards' dtype: one buffer in common memory with
  /// the shards of all ranks, which is also the contents of the page, so that a gather copies
  /// nothing. Otherwise undefined. See [Note: shards in common memory].
  at::Tensor common;
  at::Tensor own_segment;                     ///< This rank's part of the flat buffer.
  std::vector<sharding::OwnedShard> shards;   ///< One for each member, possibly empty.
  std::vector<at::Tensor> windows;            ///< The shards' memory, whatever set_data() does.
  std::unique_ptr<sharding::Page> host_page;  ///< Of the shards, if only they are on the host.
  ComputeView compute;                        ///< In use by the model.
  ComputeView idle;                    ///< Not in use; see [Note: full precision in evaluation].
  SlotPool* gradient_slots = nullptr;  ///< For unsharded gradients.

  int64_t gathered_bytes() const {
    return layout.numel() * static_cast<int64_t>(c10::elementSize(compute.dtype));
  }
  at::TensorOptions page_options() const {
    return at::TensorOptions().dtype(compute.dtype).device(device);
  }
  at::TensorOptions gradient_options() const {
    return at::TensorOptions().dtype(reduce).device(device);
  }
};

/// Parameters that are gathered and released together.
struct Unit {
  std::string name;  ///< Path of its module; "" for the root.
  std::vector<size_t> flats;
  int64_t gathered_bytes = 0;  ///< Bytes of the flat parameters that are gathered and released.
  size_t parent = 0;           ///< The nearest unit that contains it.
  bool root = false;
  bool is_gathered_on_use() const { return gathered_bytes > 0; }
};

inline std::string display_name(const Unit& unit) { return unit.root ? "(root)" : unit.name; }

/// Whether the program has given a shard other memory (set_data).
bool is_replaced(const FlatParameter& flat, size_t member);

struct ShardedModel {
  /// Computes `gathered_bytes` of the units.
  void measure();
  /// Replaced shards get their own memory again, with their new values. UsageError for another
  /// shape.
  void take_back_shards();

  std::vector<sharding::NamedTensor> parameters;
  std::vector<Unit> units;  ///< The root first.
  std::vector<FlatParameter> flats;
  struct Place {
    size_t flat = 0, member = 0;
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
  /// The shard group of gathers for forward and backward: another one than `shard_group` if
  /// parameters travel encoded between hosts. See [Note: lanes].
  sharding::Lanes gathers;

  const FlatParameter& flat_of(size_t parameter) const { return flats[places[parameter].flat]; }
  const sharding::OwnedShard& shard_of(size_t parameter) const {
    return flat_of(parameter).shards[places[parameter].member];
  }
};

/// Divides `module` into units and this rank's shards. Collective.
ShardedModel build_sharded_model(torch::nn::Module& module, ProcessGroup group,
                                 const FullyShardedDataParallelOptions& options);

/// Converts the floating-point buffers to `dtype`; unset: to their own dtype.
void convert_buffers(ShardedModel& model, const std::optional<at::ScalarType>& dtype);

}  // namespace tessera::fsdp
