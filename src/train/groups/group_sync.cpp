#include "train/groups/group_sync.h"

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::train {
namespace {

using Json = nlohmann::ordered_json;

std::string outer_set_of(int group) { return fmt::format("outer-{:05d}", group); }

constexpr const char* kGroups = "groups";
constexpr const char* kUnderWay = "under_way";

/// Whether it is an entry of LocalSgd::state_dict() with elements.
bool has_elements(const std::string& name) { return name != "steps" && name != "synchronizations"; }

}  // namespace

GroupSync::GroupSync(const LocalSgdConfig& config, const TrainingGroups& groups,
                     ModelWrapper& wrapper)
    : config_(config),
      groups_(groups),
      local_(
          groups.outer(), wrapper.shards(), config.options, wrapper.shard_copies(),
          [&wrapper] { wrapper.publish_shards(); },
          [&wrapper] {
            wrapper.wait();
            wrapper.before_shard_writes();
          }) {}

Json GroupSync::description() const {
  const auto& options = config_.options;
  return {{kGroups, groups_.count()},
          {"outer", options.outer == OuterOptimizer::nesterov ? "nesterov" : "average"},
          {"wire", options.wire == OuterWire::int8 ? "int8" : "float32"},
          {"in_background", options.overlap == Overlap::background}};
}

Json GroupSync::save(CheckpointWriter& writer) {
  const LocalSgd::State state = local_.state_dict();
  std::vector<StateSlice> slices;
  int64_t at = 0;
  for (const auto& range : local_.state_ranges()) {
    StateSlice slice;
    static_cast<ElementRange&>(slice) = range;
    for (const auto& [name, tensor] : state)
      if (has_elements(name)) slice.state.tensors[name] = tensor.narrow(0, at, range.numel);
    at += range.numel;
    slices.push_back(std::move(slice));
  }
  writer.add_slices(slices, outer_set_of(groups_.number()));
  Json saved = description();
  saved[kUnderWay] = state.count("pending") > 0;
  return saved;
}

bool GroupSync::load(const Checkpoint& checkpoint, const Json& saved, int from, int64_t steps) {
  LocalSgd::State state = local_.state_dict();
  state["steps"] = at::scalar_tensor(steps, at::kLong);
  const Json own = description();
  for (const auto& [key, value] : own.items()) {
    if (saved.is_object() && (key == kGroups || saved.value(key, Json()) == value)) continue;
    local_.load_state_dict(state);
    return false;
  }
  if (saved.value(kUnderWay, false)) state["pending"] = state["start"] = state.at("anchor");
  const auto slices = checkpoint.load_slices(local_.state_ranges(), outer_set_of(from));
  for (auto& [name, tensor] : state) {
    if (!has_elements(name)) continue;
    std::vector<at::Tensor> parts{at::empty({0}, tensor.options())};
    for (const auto& slice : slices) {
      const auto found = slice.state.tensors.find(name);
      if (found == slice.state.tensors.end())
        throw UsageError(fmt::format("checkpoint: {}: {} has no {} of parallel.local_sgd for {}",
                                     checkpoint.path(), outer_set_of(from), name, slice.parameter));
      parts.push_back(found->second.reshape({-1}).to(tensor.options()));
    }
    tensor = at::cat(parts);
  }
  local_.load_state_dict(state);
  return true;
}

}  // namespace tessera::train
