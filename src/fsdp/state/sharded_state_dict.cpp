#include <limits>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/store/run_folder.h"
#include "fsdp/state/state_dict_checks.h"
#include "sharding/bucket.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/module_state_dict.h"
#include "tessera/step/agreement.h"

namespace tessera {

using namespace fsdp;
using nlohmann::json;

namespace {

constexpr int64_t kStep = 0;
constexpr const char* kSliceSet = "model";
constexpr const char* kValue = "value";  // name of the tensor in a slice
constexpr const char* kUnshardedFile = "buffers.safetensors";
constexpr const char* kLayoutFile = "model.json";

// [Note: sharded checkpoint] The checkpoint has a slice set with the shards, a safetensors file
// with the buffers and ignored parameters of rank 0, and model.json with shape and strides of each
// parameter. Slices are in memory order, so the strides are needed to load them into a module that
// stores a parameter in another order. The folder is that of a checkpoint store with the single
// step 0.

std::vector<StateSlice> shards_as_slices(const ShardedModule& sharded) {
  std::vector<StateSlice> slices;
  for (const auto* shard : sharded.model.shards()) {
    const auto& [name, parameter] = sharded.model.parameters[shard->parameter];
    if (shard->numel == 0) continue;
    StateSlice slice{{name, parameter.sizes().vec(), shard->begin, shard->numel}, {}};
    slice.state.tensors[kValue] = sharding::in_memory_order(shard->tensor.detach());
    slices.push_back(std::move(slice));
  }
  return slices;
}

std::string layout_text(const ShardedModule& sharded) {
  json layout = json::object();
  for (const auto& [name, parameter] : sharded.model.parameters)
    layout[name] = {{"shape", parameter.sizes().vec()}, {"strides", parameter.strides().vec()}};
  return json{{"parameters", layout}}.dump(1);
}

/// Everything that this rank needs from a sharded checkpoint.
class LoadedShards {
 public:
  LoadedShards(const ShardedModule& sharded, const Checkpoint& checkpoint, bool strict) {
    const json layout = json::parse(checkpoint.text(kLayoutFile)).at("parameters");
    const auto found = match(sharded, checkpoint, layout, strict);
    const auto& names = found.names;
    unmatched_ = found.unmatched;
    std::vector<ElementRange> ranges;
    for (size_t i = 0; i < sharded.model.parameters.size(); ++i) {
      const auto& parameter = sharded.model.parameters[i].tensor;
      const auto known = names.find(sharded.model.parameters[i].name);
      const auto& shard = sharded.model.shard_of(i);
      if (known == names.end() || shard.numel == 0) continue;
      const auto& name = known->second;
      const auto strides = layout.at(name).at("strides").get<std::vector<int64_t>>();
      const bool same_order = strides == parameter.strides().vec();
      if (same_order) ranges.push_back({name, parameter.sizes().vec(), shard.begin, shard.numel});
      else ranges.push_back({name, parameter.sizes().vec(), 0, parameter.numel()});
      parameters_.push_back({i, same_order, strides, {}});
    }
    const auto slices = checkpoint.load_slices(ranges, kSliceSet);
    for (size_t r = 0; r < slices.size(); ++r) {
      const auto value = slices[r].state.tensors.find(kValue);
      if (value == slices[r].state.tensors.end())
        throw UsageError(checkpoint.path() + ": no rank saved parameter " + ranges[r].parameter);
      parameters_[r].value = value->second;
    }
    for (const auto& [name, tensor] : unsharded(sharded))
      if (const auto known = names.find(name); known != names.end())
        unsharded_.emplace_back(tensor, checkpoint.load_tensor(kUnshardedFile, known->second));
  }

  const UnmatchedNames& unmatched() const { return unmatched_; }

  void copy_to(ShardedModule& sharded) const {
    for (const auto& [index, same_order, strides, value] : parameters_) {
      if (same_order) {
        sharding::in_memory_order(sharded.model.shard_of(index).tensor.detach()).copy_(value);
      } else {
        const auto sizes = sharded.model.parameters[index].tensor.sizes();
        take_shard(sharded.model, index, value.as_strided(sizes, strides));
      }
    }
    for (const auto& [tensor, value] : unsharded_) at::Tensor(tensor).copy_(value);
  }

 private:
  struct Parameter {
    size_t index;
    bool same_order;  // `value` is this rank's shard; otherwise the whole parameter
    std::vector<int64_t> strides;
    at::Tensor value;
  };

  static WeightsMatch match(const ShardedModule& sharded, const Checkpoint& checkpoint,
                            const json& layout, bool strict) {
    std::vector<SafetensorsEntry> given;
    for (const auto& item : layout.items())
      given.push_back({item.key(), "", item.value().at("shape").get<std::vector<int64_t>>()});
    if (checkpoint.contains(kUnshardedFile)) {
      const auto& more = checkpoint.tensors(kUnshardedFile).entries();
      given.insert(given.end(), more.begin(), more.end());
    }
    return detail::match_entries(sharded.module, checkpoint.path(), given, strict);
  }

  std::vector<Parameter> parameters_;
  std::vector<std::pair<at::Tensor, at::Tensor>> unsharded_;
  UnmatchedNames unmatched_;
};

}  // namespace

void FullyShardedDataParallelBase::save_sharded_state_dict(const std::string& folder) {
  auto& sharded = *sharded_;
  sharded.require_idle("save_sharded_state_dict");
  CheckpointStoreOptions keep_all;
  keep_all.keep_last = std::numeric_limits<int>::max();
  const CheckpointStore store(folder, sharded.model.world, keep_all);
  CheckpointWriter writer(store, kStep);
  if (first_replica()) writer.add_slices(shards_as_slices(sharded), kSliceSet);
  if (sharded.model.world.rank() == 0) {
    const auto tensors = unsharded_values(sharded);
    if (!tensors.empty()) writer.add_tensors(kUnshardedFile, tensors);
    writer.add_text(kLayoutFile, layout_text(sharded));
  }
  writer.commit();
}

UnmatchedNames FullyShardedDataParallelBase::load_sharded_state_dict(const std::string& folder,
                                                                     bool strict) {
  auto& sharded = *sharded_;
  sharded.require_idle("load_sharded_state_dict");
  at::NoGradGuard no_grad;
  constexpr const char* kCall = "load_sharded_state_dict";
  std::optional<Checkpoint> checkpoint;
  std::optional<LoadedShards> loaded;
  try {
    checkpoint.emplace(folder + "/" + store::step_name(kStep), sharded.model.world);
    checkpoint->verify(sharded.model.world);
    checkpoint->read_together([&] { loaded.emplace(sharded, *checkpoint, strict); });
  } catch (const UsageError& error) {
    throw AgreedError(fmt::format("{}: {}: {}", kName, kCall, error.what()));
  }
  sharded.residency->release_all();
  loaded->copy_to(sharded);
  return loaded->unmatched();
}

}  // namespace tessera
