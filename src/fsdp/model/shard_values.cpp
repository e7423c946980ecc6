#include <memory>

#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "deferred/contents.h"
#include "fsdp/model/sharded_model.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"

namespace tessera::fsdp {

namespace {

/// Consecutive parameters of a flat parameter that are filled together: as many as fit in this many
/// bytes, at least one.
constexpr size_t kFilledTogether = 25 << 20;

/// Copies this rank's shards from members [first, last). A parameter that is deferred is computed
/// for this moment only, and not at all where it comes from rank 0.
void fill_members(ShardedModel& model, FlatParameter& flat, size_t first, size_t last,
                  bool from_rank0) {
  std::vector<std::unique_ptr<deferred::Contents>> contents;
  std::vector<at::Tensor> sources;
  for (size_t m = first; m < last; ++m) {
    const auto& tensor = flat.parameters[m];
    if (from_rank0 && model.world.rank() != 0 && is_deferred(tensor)) {
      sources.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
    } else {
      comm::run_local_work(model.world, kName, [&] {
        contents.push_back(std::make_unique<deferred::Contents>(tensor));
      });
      sources.push_back(tensor);
    }
  }
  if (from_rank0) model.world.broadcast(sources, 0);
  for (size_t m = first; m < last; ++m) {
    const auto& shard = flat.shards[m];
    sharding::window(flat.own_segment, shard.at, shard.numel)
        .copy_(sharding::in_memory_order(sources[m - first]).narrow(0, shard.begin, shard.numel));
  }
}

}  // namespace

// The same batches on all ranks.
void fill_shards(ShardedModel& model, bool from_rank0) {
  for (auto* flat : model.flats) {
    size_t first = 0, bytes = 0;
    for (size_t m = 0; m < flat->members.size(); ++m) {
      const auto more = flat->parameters[m].nbytes();
      if (m > first && bytes + more > kFilledTogether) {
        fill_members(model, *flat, first, m, from_rank0);
        first = m;
        bytes = 0;
      }
      bytes += more;
    }
    fill_members(model, *flat, first, flat->members.size(), from_rank0);
  }
}

void ShardedModel::take_back_shards() {
  at::NoGradGuard no_grad;
  struct Replaced {
    at::Tensor shard, window, values;
  };
  std::vector<Replaced> replaced;
  for (const auto* flat : flats) {
    for (size_t m = 0; m < flat->shards.size(); ++m) {
      if (!flat->is_replaced(m)) continue;
      const auto& shard = flat->shards[m].tensor;
      const auto& window = flat->windows[m];
      if (shard.sizes() != window.sizes()) {
        world.fail(fmt::format(
            "{}: rank {}: the shard of parameter {} has shape {} since set_data(); expected {}, "
            "as before",
            kName, world.rank(), parameters[flat->members[m]].name, c10::str(shard.sizes()),
            c10::str(window.sizes())));
      }
      // Copies, because two shards may have exchanged their memory.
      replaced.push_back({shard, window, shard.detach().clone()});
    }
  }
  for (auto& [shard, window, values] : replaced) {
    window.copy_(values);
    const sharding::NoDetection no_detection;
    shard.set_data(window);
    shard.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace tessera::fsdp
