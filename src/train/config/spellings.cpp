#include "train/config/spellings.h"

#include <algorithm>
#include <cctype>

#include "tessera/config/option_reader.h"

namespace tessera::train {
namespace {

using Kind = ConfigNode::Kind;

constexpr const char* kDdp = "DistributedDataParallel";
constexpr const char* kDistributed = "DistributedOptimizer";
constexpr const char* kFsdp = "FullyShardedDataParallel";
constexpr const char* kZero = "ZeroRedundancyOptimizer";

struct Spelling {
  const char* type;  ///< parallel.type
  const char* key;
  const char* other;  ///< what is said of it
};

/// Keys that stand for another one. The lists of several keys are joined.
constexpr Spelling kKeys[] = {{kFsdp, "ignored_modules", "ignored_states"},
                              {kFsdp, "ignored_parameters", "ignored_states"}};

/// Keys whose words may be in any case and begin with this.
constexpr Spelling kWords[] = {{kDistributed, "reduce_method", ""},
                               {kFsdp, "sharding_strategy", ""},
                               {kFsdp, "backward_prefetch", "backward_"}};

/// Keys whose value may be a map with this key alone.
constexpr Spelling kMaps[] = {{kFsdp, "cpu_offload", "offload_params"}};

/// Keys that no option stands for.
constexpr Spelling kRefused[] = {
    {kDdp, "broadcast_buffers", "no option; expected buffers: none for false"},
    {kDdp, "gradient_as_bucket_view", "no option; gradients always are views of the buckets"},
    {kDistributed, "bucket_cap_mb",
     "no option of DistributedOptimizer, which packs by param_pack and param_pack_thd"},
    {kFsdp, "reshard_after_forward",
     "no option; expected sharding_strategy: shard_grad_op for false"},
    {kFsdp, "forward_prefetch",
     "no option; expected overlap: none for false, or backward or background for true"},
    {kZero, "overlap_with_ddp", "no option; expected overlap: none, backward or background"}};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char letter) { return std::tolower(letter); });
  return text;
}

/// Appends the strings of `from`, one or a list, to those of `to`.
void append(const ConfigNode& from, ConfigNode& to) {
  if (to.kind == Kind::Scalar) to.items = {to};
  to.kind = Kind::Sequence;
  if (from.kind == Kind::Scalar) to.items.push_back(from);
  to.items.insert(to.items.end(), from.items.begin(), from.items.end());
}

void rename(ConfigNode& parallel, const Spelling& spelling) {
  const auto found = std::find_if(parallel.members.begin(), parallel.members.end(),
                                  [&](const auto& member) { return member.key == spelling.key; });
  if (found == parallel.members.end()) return;
  if (ConfigNode* own = parallel.find(spelling.other)) {
    append(found->value, *own);
    parallel.members.erase(found);
  } else {
    found->key = spelling.other;
  }
}

}  // namespace

void use_own_spellings(ConfigNode& parallel) {
  const ConfigNode* type = parallel.find("type");
  if (type == nullptr) return;
  const std::string wrapper = type->text;
  for (const auto& each : kKeys)
    if (wrapper == each.type) rename(parallel, each);
  for (const auto& each : kWords) {
    ConfigNode* node = wrapper == each.type ? parallel.find(each.key) : nullptr;
    if (node == nullptr) continue;
    node->text = lower(node->text);
    if (node->text.rfind(each.other, 0) == 0) node->text.erase(0, std::string(each.other).size());
  }
  for (const auto& each : kMaps) {
    ConfigNode* node = wrapper == each.type ? parallel.find(each.key) : nullptr;
    if (node == nullptr || node->members.size() != 1) continue;
    if (node->members[0].key == each.other) *node = ConfigNode(node->members[0].value);
  }
  for (const auto& each : kRefused)
    if (const auto* node = wrapper == each.type ? parallel.find(each.key) : nullptr)
      fail_at(*node, std::string("parallel.") + each.key, each.other);
}

}  // namespace tessera::train
