#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/paging/page.h"
#include "fsdp/paging/slots.h"
#include "sharding/layout.h"
#include "sharding/named_tensor.h"
#include "sharding/owned_shard.h"

namespace tessera::fsdp {

/// A dtype to compute in, and what a flat is gathered into for it.
struct ComputeView {
  at::ScalarType dtype = at::kFloat;
  std::unique_ptr<Page> page;
  SlotPool* slots = nullptr;  ///< Null where shards are common.
};

/// Parameters of one unit, dtype, device and trainability: one shard, one gather, one reduction.
struct FlatParameter {
  size_t unit = 0;
  std::vector<size_t> members;  ///< Indices into the list of parameters, in the layout's order.
  sharding::Layout layout;
  at::ScalarType dtype = at::kFloat;   ///< Of the shard.
  at::ScalarType reduce = at::kFloat;  ///< Of unsharded gradients.
  at::Device device = at::kCPU;        ///< Of the page.
  bool trainable = true;
  bool permanent = false;  ///< The page is the shard: nothing is ever gathered or released.

  /// The page's contents, where the ranks share memory and compute in the shards' dtype: every
  /// rank's shard in its place, one memory for all. A gather then moves nothing. Undefined
  /// elsewhere. See [Note: shards in common].
  at::Tensor common;
  at::Tensor own_segment;                    ///< Own segment.
  std::vector<sharding::OwnedShard> shards;  ///< One a member, possibly empty.
  ComputeView compute;                       ///< What the model computes with.
  ComputeView idle;  ///< Where evaluation has full precision: the other one. See precision.cpp.
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

struct Unit {
  std::string name;  ///< "" for the root
  std::vector<size_t> flats;
  int64_t gathered_bytes = 0;  ///< Of flats that come and go.
  size_t parent = 0;           ///< The nearest unit around it.
  bool root = false;
  bool pages() const { return gathered_bytes > 0; }
};

inline std::string display_name(const Unit& unit) { return unit.root ? "(root)" : unit.name; }

struct ShardedModel;
/// Floating-point buffers become `dtype`; unset: their own.
void convert_buffers(ShardedModel& model, const std::optional<at::ScalarType>& dtype);

/// The model as it is dealt out. Everything else in this folder works on it.
struct ShardedModel {
  /// Fills in `gathered_bytes` of the units.
  void measure();

  std::vector<sharding::NamedTensor> parameters;
  std::vector<Unit> units;
  std::vector<FlatParameter> flats;
  struct Place {
    size_t flat = 0, member = 0;
  };
  std::vector<Place> places;  ///< One a parameter.
  struct Buffer {
    at::Tensor tensor;
    at::ScalarType own;  ///< Its dtype at construction.
  };
  std::vector<Buffer> buffers;  ///< Those of floating point.
  ProcessGroup world, shard_group, replicas;

  const FlatParameter& flat_of(size_t parameter) const { return flats[places[parameter].flat]; }
  const sharding::OwnedShard& shard_of(size_t parameter) const {
    return flat_of(parameter).shards[places[parameter].member];
  }
};

}  // namespace tessera::fsdp
