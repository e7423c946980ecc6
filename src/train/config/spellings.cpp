#include "train/config/spellings.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "tessera/config/option_reader.h"
#include "tessera/train/registries.h"

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
  const char* other;  ///< the text about it
};

/// Keys that mean another key. The lists of several keys are joined.
constexpr Spelling kKeys[] = {{kFsdp, "ignored_modules", "ignored_states"},
                              {kFsdp, "ignored_parameters", "ignored_states"}};

/// Keys whose words may be in any case and begin with this.
constexpr Spelling kWords[] = {{kDistributed, "reduce_method", ""},
                               {kFsdp, "sharding_strategy", ""},
                               {kFsdp, "backward_prefetch", "backward_"}};

/// Keys whose value may be a map with this key alone.
constexpr Spelling kMaps[] = {{kFsdp, "cpu_offload", "offload_params"}};

/// Keys that correspond to no option.
constexpr Spelling kRefused[] = {
    {kDdp, "broadcast_buffers", "no option; expected buffers: none for false"},
    {kDdp, "gradient_as_bucket_view", "no option; gradients always are views of the buckets"},
    {kDistributed, "bucket_cap_mb",
     "no option of DistributedOptimizer, which packs by param_pack and param_pack_thd"},
    {kFsdp, "reshard_after_forward",
     "no option; expected sharding_strategy: shard_grad_op for false"},
    {kFsdp, "forward_prefetch",
     "no option; expected overlap: none for false, or backward or background for true"},
    {kFsdp, "auto_wrap_policy", "no option; expected wrap_policy"},
    {kFsdp, "fsdp_auto_wrap_policy", "no option; expected wrap_policy"},
    {kFsdp, "use_orig_params", "no option; parameters always keep their names and groups"},
    {kFsdp, "limit_all_gathers", "no option; resident_bytes limits gathered parameters"},
    {kFsdp, "device_id", "no option; expected model.device"},
    {kFsdp, "param_init_fn", "no option; expected model.deferred: true"},
    {kZero, "optimizer_class", "no option; expected optimizer_type, or optimizer.type"},
    {kZero, "overlap_with_ddp", "no option; expected overlap: none, backward or background"}};

struct Hint {
  const char* theirs;  ///< a dotted key, or a value of keys `type`
  const char* own;
};

/// Keys of mmengine and PyTorch elsewhere.
constexpr Hint kForeignKeys[] = {
    {"optim_wrapper",
     "optimizer; its accumulative_counts is train.accumulation, its clip_grad train.clip_grad_norm,"
     " AmpOptimWrapper is train.autocast with train.loss_scale, and OptimWrapperDict is models"},
    {"param_scheduler", "scheduler; several are {type: chained, schedules: […]}"},
    {"val_evaluator", "metrics"},
    {"test_evaluator", "metrics"},
    {"val_cfg", "train.eval_every"},
    {"train_cfg", "train.steps or train.epochs, and train.eval_every"},
    {"train_dataloader", "data, and train.global_batch"},
    {"val_dataloader", "the evaluation part of data, and train.eval_batch"},
    {"model_wrapper_cfg", "parallel"},
    {"strategy", "parallel"},
    {"default_hooks", "checkpoint, train.log_every, and hooks"},
    {"custom_hooks", "hooks"},
    {"load_from", "model.init for weights, or checkpoint.from for a whole run"},
    {"resume", "checkpoint.resume"},
    {"work_dir", "checkpoint.folder, train.log and train.save"},
    {"randomness", "model.seed and data.seed"},
    {"checkpoint.save_best", "keep_best: {metric: …, mode: …}"},
    {"checkpoint.rule", "keep_best: {metric: …, mode: …}"},
    {"checkpoint.interval", "every"},
    {"checkpoint.max_keep_ckpts", "keep_last"},
    {"train.max_iters", "steps"},
    {"train.max_epochs", "epochs"},
    {"train.val_interval", "eval_every"},
    {"train.accumulative_counts", "accumulation"},
    {"train.clip_grad", "clip_grad_norm or clip_grad_value"}};

/// Names of their components. A name that the program has registered is its own.
constexpr Hint kForeignTypes[] = {
    {"OptimWrapper", "the optimizer itself"},
    {"OptimWrapperDict", "section models, with an optimizer for each"},
    {"AmpOptimWrapper", "the optimizer itself, with train.autocast and train.loss_scale"},
    {"ConstantLR", "linear with equal factors"},
    {"LinearLR", "linear"},
    {"StepLR", "step"},
    {"MultiStepLR", "multi_step"},
    {"ExponentialLR", "exponential"},
    {"PolyLR", "polynomial"},
    {"PolynomialLR", "polynomial"},
    {"CosineAnnealingLR", "cosine"},
    {"SequentialLR", "chained"},
    {"FSDP", kFsdp},
    {"MMFullyShardedDataParallel", kFsdp},
    {"DDP", kDdp},
    {"MMDistributedDataParallel", kDdp},
    {"size_based_auto_wrap_policy", "size_based"},
    {"CheckpointHook", "section checkpoint"},
    {"EarlyStoppingHook", "train.early_stop"},
    {"EMAHook", "train.ema"}};

bool is_registered(const std::string& name) {
  const auto has = [&](const auto&... registries) { return (registries.contains(name) || ...); };
  return has(registry::models(), registry::datasets(), registry::losses(), registry::metrics(),
             registry::optimizers(), registry::schedulers(), registry::parallel(),
             registry::wrap_policies(), registry::comm_hooks(), registry::hooks(),
             registry::preprocessors());
}

void refuse_keys(const ConfigNode& root) {
  for (const auto& [theirs, own] : kForeignKeys) {
    const std::string key = theirs;
    const auto dot = key.find('.');
    const ConfigNode* node = root.find(key.substr(0, dot));
    if (node != nullptr && dot != std::string::npos) node = node->find(key.substr(dot + 1));
    if (node != nullptr) fail_at(*node, key, std::string("no key here; expected ") + own);
  }
}

void refuse_type(const ConfigNode& node, const std::string& path) {
  const std::string& type = node.text;
  const std::string end = "optimizer.type";
  const bool optimizer = path == end || path.ends_with("." + end);
  if (optimizer && !registry::optimizers().contains(type) && registry::parallel().contains(type))
    fail_at(node, path,
            type + " wraps an optimizer; expected parallel.type: " + type +
                ", and here the type of the optimizer, such as AdamW");
  for (const auto& [theirs, own] : kForeignTypes)
    if (type == theirs && !is_registered(type))
      fail_at(node, path, type + " is a name of PyTorch or mmengine; expected " + own);
}

/// The names of components in `node`: keys `type`, and names alone. `key`, `path`: of `node`.
void refuse_types(const ConfigNode& node, const std::string& key, const std::string& path) {
  constexpr std::string_view kNames[] = {"type", "hooks", "metrics", "wrap_policy", "loss"};
  if (node.kind == Kind::Scalar && std::count(std::begin(kNames), std::end(kNames), key) > 0)
    refuse_type(node, path);
  for (size_t i = 0; i < node.items.size(); ++i)
    refuse_types(node.items[i], key, path + "." + std::to_string(i));
  for (const auto& [inner, value] : node.members)
    refuse_types(value, inner, path.empty() ? inner : path + "." + inner);
}

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

/// In section `parallel` of `owner`; `path` begins the messages.
void use_own_spellings_of_wrapper(ConfigNode& owner, const std::string& path) {
  ConfigNode* section = owner.find("parallel");
  const ConfigNode* type = section == nullptr ? nullptr : section->find("type");
  if (type == nullptr) return;
  ConfigNode& parallel = *section;
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
      fail_at(*node, path + "parallel." + each.key, each.other);
}

}  // namespace

void use_own_spellings(ConfigNode& root) {
  refuse_keys(root);
  refuse_types(root, "", "");
  use_own_spellings_of_wrapper(root, "");
  if (ConfigNode* models = root.find("models"))
    for (auto& [name, model] : models->members)
      use_own_spellings_of_wrapper(model, "models." + name + ".");
}

}  // namespace tessera::train
