#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/base/comm_stream.h"
#include "fsdp/paging/slot_pool.h"
#include "sharding/detection/page.h"
#include "sharding/gradients/lanes.h"
#include "sharding/layout.h"
#include "sharding/owned_shard.h"

namespace tessera::fsdp {

/// The gather of a flat parameter for computing in one dtype.
struct ComputeView {
  at::ScalarType dtype = at::kFloat;
  std::unique_ptr<sharding::Page> page;
  SlotPool* slots = nullptr;  ///< Null if the ranks' shards are in common memory.
  at::Tensor gathered;        ///< The memory of the page; undefined while it is released.
  Work gather;
};

/// The gradients of a flat parameter.
struct FlatGradients {
  SlotPool* slots = nullptr;
  at::Tensor flat;                ///< A slot; undefined while it holds no gradient.
  std::vector<at::Tensor> views;  ///< One for each member.
  std::vector<char> has;          ///< Members whose gradient arrived since the last reduction.
  std::vector<char> placed;       ///< Members whose gradient was computed there in this backward.
  bool early = false;             ///< The slot was taken before the first gradient has arrived.
  /// One parameter is more than half of it. If that parameter is tied, autograd keeps its first
  /// gradient until it has the second. The flat buffer is then filled only when all gradients
  /// have arrived; otherwise the same gradient would be in memory three times.
  bool defer_until_complete = false;
  bool reduced = false;    ///< In this backward.
  at::Tensor own_segment;  ///< This rank's part of the mean.
  /// The same memory, of which the shards' gradients are views; null where they are not watched:
  /// see [Note: norms of one rank].
  std::unique_ptr<sharding::Page> page;
};

/// This rank's part of a flat parameter.
struct OwnPart {
  /// If the ranks share memory and compute in the shards' dtype: one buffer in common memory with
  /// the shards of all ranks, which is also the contents of the page, so that a gather copies
  /// nothing. Otherwise undefined. See [Note: shards in common memory].
  at::Tensor common;
  at::Tensor own_segment;                     ///< This rank's part of the flat buffer.
  std::vector<sharding::OwnedShard> shards;   ///< One for each member, possibly empty.
  std::vector<at::Tensor> windows;            ///< The shards' memory, whatever set_data() does.
  std::unique_ptr<sharding::Page> host_page;  ///< Of the shards, if only they are on the host.

  at::ScalarType dtype() const { return own_segment.scalar_type(); }  ///< Of the shards.
  /// True if the program has given a shard other memory (set_data).
  bool is_replaced(size_t member) const;
};

/// The parameters of one unit with the same dtype, device and trainability. They have one flat
/// buffer, one gather and one reduction.
struct FlatParameter : OwnPart {
  size_t index = 0;             ///< In ShardedModel::flats.
  size_t unit = 0;              ///< Index of its unit.
  std::vector<size_t> members;  ///< Indices into ShardedModel::parameters, in the layout's order.
  std::vector<at::Tensor> parameters;  ///< The members.
  sharding::Layout layout;
  at::ScalarType reduce = at::kFloat;  ///< Of unsharded gradients.
  at::Device device = at::kCPU;        ///< Of the page.
  bool trainable = true;
  bool permanent = false;  ///< The shards are whole parameters: nothing is gathered or released.
  ComputeView compute;     ///< In use by the model.
  ComputeView idle;        ///< Not in use; see [Note: full precision in evaluation].
  FlatGradients gradients;

  int64_t gathered_bytes() const {
    return layout.numel() * static_cast<int64_t>(c10::elementSize(compute.dtype));
  }
  at::TensorOptions page_options() const {
    return at::TensorOptions().dtype(compute.dtype).device(device);
  }
  at::TensorOptions gradient_options() const {
    return at::TensorOptions().dtype(reduce).device(device);
  }
  /// The elements of `rank` in a tensor of the whole flat parameter.
  at::Tensor part_of(const at::Tensor& whole, int rank) const {
    return whole.narrow(0, layout.segment_begin(rank), layout.counts()[rank]);
  }
  bool on_host() const { return own_segment.device() != device; }  ///< The shards alone.
  /// Where the gradient of a shard is, and the same as a view of the page.
  at::Tensor gradient_window(size_t member) const;
  at::Tensor shard_gradient(size_t member) const;
};

/// Parameters that are gathered and released together: their flat parameters, gathered memory and
/// gradients. All units are under ShardedModel::mutex.
struct Unit {
  enum class State : uint8_t { released, gathering, resident };

  std::string name;  ///< Path of its module; "" for the root.
  std::vector<FlatParameter> flats;
  size_t parent = 0;  ///< The nearest unit that contains it.
  bool root = false;
  State state = State::released;
  comm::CommStream::Mark mark;  ///< Of its last gather.
  bool changed = false;         ///< The optimizer will change the shards, or has changed them.
  bool reduced = false;         ///< Its gradients were reduced, and are not cleared yet.
  uint64_t gathered_versions = 0, forward_versions = 0;  ///< Of the shards, then.
  uint64_t last_use = 0;
  bool in_forward = false;  ///< Used since the last forward has begun.

  /// Bytes of the flat parameters that are gathered and released.
  int64_t gathered_bytes() const;
  /// The sum of the shards' versions.
  uint64_t versions() const;
  bool has_gradients() const;
  /// True if the values are not those of the last forward.
  bool is_stale() const;
  bool on_host() const;
  std::string display_name() const { return root ? "(root)" : name; }

  /// Begins to gather; `turn` counts the gathers of a phase: see [Note: lanes]. `diverged`: the
  /// unit may be resident already, because other ranks gather it.
  void gather(int rank, const sharding::Lanes& lanes, size_t& turn, const comm::CommStream& stream,
              bool diverged);
  /// Waits for the gather, if one is under way. If the ranks diverged before it, the unit is
  /// released.
  void settle(const comm::CommStream& stream);
  /// Waits for the gather, if one is under way.
  void finish(const comm::CommStream& stream);
  void release(const comm::CommStream& stream);
  /// A forward begins. If the shards have changed since the last one, the parameters' versions
  /// change too: autograd then refuses a graph of an earlier forward that needs their values.
  void note_versions();
};

}  // namespace tessera::fsdp
