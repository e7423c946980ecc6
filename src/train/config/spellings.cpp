#include "train/config/spellings.h"

#include <algorithm>
#include <cctype>
#include <string_view>

#include "tessera/config/option_reader.h"
#include "tessera/error.h"
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
  std::string_view theirs;  ///< keys, or values of keys `type`, each followed by a space
  const char* own;
};

/// Keys of mmengine and PyTorch. A dotted one is the end of a path.
constexpr Hint kForeignKeys[] = {
    {"optim_wrapper ",
     "optimizer; its accumulative_counts is train.accumulation, its clip_grad train.clip_grad_norm,"
     " AmpOptimWrapper is train.autocast with train.loss_scale, and OptimWrapperDict is models"},
    {"param_scheduler lr_scheduler lr_config ",
     "scheduler; several are {type: chained, schedules: […]}"},
    {"scheduler.by_epoch ", "by: epoch, or by: step"},
    {"scheduler.begin scheduler.end ", "{type: chained, schedules: […]}, each with begin and end"},
    {"val_evaluator test_evaluator ", "metrics"},
    {"val_cfg test_cfg evaluation ", "train.eval_every"},
    {"train_cfg ", "train.steps or train.epochs, and train.eval_every"},
    {"train_dataloader ", "data, and train.global_batch"},
    {"val_dataloader test_dataloader ", "the evaluation part of data, and train.eval_batch"},
    {"model_wrapper_cfg model_wrapper strategy ", "parallel"},
    {"default_hooks ", "checkpoint, train.log_every, and hooks"},
    {"custom_hooks visualizer ", "hooks"},
    {"load_from resume_from ", "model.init for weights, or checkpoint.from for a whole run"},
    {"resume ", "checkpoint.resume"},
    {"work_dir ", "checkpoint.folder, train.log and train.save"},
    {"randomness seed ", "model.seed and data.seed"},
    {"launcher ", "tessera train -n RANKS, or another launcher around it"},
    {"_base_ ", "base"},
    {"checkpoint.save_best checkpoint.rule ", "keep_best: {metric: …, mode: …}"},
    {"save_best ", "checkpoint.keep_best: {metric: …, mode: …}"},
    {"checkpoint.interval ", "every"},
    {"max_keep_ckpts ", "checkpoint.keep_last"},
    {"monitor ", "metric"},
    {"rule ", "mode: max, or mode: min"},
    {"ema.momentum ", "decay, which is 1 - momentum"},
    {"max_iters ", "train.steps"},
    {"max_epochs num_epochs ", "train.epochs"},
    {"val_interval ", "train.eval_every"},
    {"batch_size ", "train.global_batch, the batch of all ranks together"},
    {"accumulative_counts gradient_accumulation_steps ", "train.accumulation"},
    {"clip_grad max_grad_norm ", "train.clip_grad_norm or train.clip_grad_value"},
    {"amp bf16 fp16 precision ", "train.autocast and train.loss_scale"},
    {"paramwise_cfg ", "optimizer.paramwise"},
    {"num_workers ", "data.loader_threads"},
    {"shuffle sampler ", "data.order"},
    {"pretrained init_cfg ", "model.init"},
    {"frozen_stages ", "model.freeze"},
    {"find_unused_parameters ", "it in parallel, with type DistributedDataParallel"},
    {"auto_wrap_policy fsdp_auto_wrap_policy ", "parallel.wrap_policy"},
    {"min_num_params ", "wrap_policy: {type: size_based, min_numel: …}"},
    {"transformer_layer_cls ", "patterns, the names of modules"},
    {"use_orig_params ", "nothing: parameters always keep their names and groups"},
    {"sync_module_states init_sync ", "nothing: all ranks always get the values of rank 0"},
    {"broadcast_buffers ", "buffers: none for false"},
    {"device_ids output_device ", "model.device"},
    {"mp_policy ", "mixed_precision"},
    {"offload_policy ", "cpu_offload"},
    {"mesh device_mesh process_group ", "nothing, or shard_group_size for hybrid_shard"}};

/// Names of their components. A name that the program has registered is its own.
constexpr Hint kForeignTypes[] = {
    {"OptimWrapper ", "the optimizer itself"},
    {"OptimWrapperDict ", "section models, with an optimizer for each"},
    {"AmpOptimWrapper ApexOptimWrapper ",
     "the optimizer itself, with train.autocast and train.loss_scale"},
    {"ConstantLR ", "linear with equal factors"},
    {"LinearLR ", "linear"},
    {"StepLR ", "step"},
    {"MultiStepLR ", "multi_step"},
    {"ExponentialLR ", "exponential"},
    {"PolyLR PolynomialLR ", "polynomial"},
    {"CosineAnnealingLR ", "cosine"},
    {"OneCycleLR ", "warmup_cosine"},
    {"SequentialLR ", "chained"},
    {"FSDP FSDP2 fsdp fully_shard FSDPStrategy MMFullyShardedDataParallel ", kFsdp},
    {"DDP ddp DDPStrategy DataParallel MMDistributedDataParallel ", kDdp},
    {"MMSeparateDistributedDataParallel ", "section models, with a wrapper for each"},
    {"ZeRO DeepSpeedStrategy ", kZero},
    {"size_based_auto_wrap_policy ", "size_based"},
    {"transformer_auto_wrap_policy ModuleWrapPolicy ", "name_based, with patterns"},
    {"always_wrap_policy ", "leaves"},
    {"fp16_compress_hook ", "fp16"},
    {"bf16_compress_hook ", "bf16"},
    {"powerSGD_hook ", "power_sgd"},
    {"CrossEntropyLoss ", "cross_entropy"},
    {"MSELoss ", "mse"},
    {"L1Loss ", "l1"},
    {"SmoothL1Loss ", "smooth_l1"},
    {"BCEWithLogitsLoss ", "bce_with_logits"},
    {"Accuracy ", "accuracy or top_k"},
    {"IoUMetric ", "mean_iou"},
    {"F1Score ", "f1"},
    {"CheckpointHook ", "section checkpoint"},
    {"EarlyStoppingHook ", "train.early_stop"},
    {"EMAHook ", "train.ema"},
    {"LoggerHook IterTimerHook ", "train.log and train.log_every"},
    {"ParamSchedulerHook ", "section scheduler"},
    {"SyncBuffersHook ", "parallel.buffers"},
    {"TensorboardVisBackend ", "TensorBoard"}};

/// True if `path` is one of `names`, or ends with a dot and one of them.
bool is_one_of(std::string_view path, std::string_view names) {
  for (size_t end = 0; (end = names.find(' ')) != names.npos; names.remove_prefix(end + 1)) {
    const auto name = names.substr(0, end);
    const bool ends = path.ends_with(name);
    if (ends && (path.size() == name.size() || path[path.size() - name.size() - 1] == '.'))
      return true;
  }
  return false;
}

bool is_registered(const std::string& name) {
  const auto has = [&](const auto&... registries) { return (registries.contains(name) || ...); };
  return has(registry::models(), registry::datasets(), registry::losses(), registry::metrics(),
             registry::optimizers(), registry::schedulers(), registry::parallel(),
             registry::wrap_policies(), registry::comm_hooks(), registry::hooks(),
             registry::preprocessors());
}

void refuse_type(const ConfigNode& node, const std::string& path) {
  const std::string& type = node.text;
  if (is_one_of(path, "optimizer.type ") && !registry::optimizers().contains(type) &&
      registry::parallel().contains(type))
    fail_at(node, path,
            type + " wraps an optimizer; expected parallel.type: " + type +
                ", and here the type of the optimizer, such as AdamW");
  if (is_registered(type)) return;
  const std::string name = type.substr(type.rfind('.') + 1);  // torch.optim.AdamW
  std::string own = name != type && is_registered(name) ? name : "";
  for (const auto& hint : kForeignTypes)
    if (is_one_of(name, hint.theirs)) own = hint.own;
  if (!own.empty())
    fail_at(node, path, type + " is a name of PyTorch or mmengine; expected " + own);
}

/// The names of components in `node`: keys `type`, and names alone. `key`, `path`: of `node`.
void refuse_types(const ConfigNode& node, const std::string& key, const std::string& path) {
  constexpr std::string_view kNames[] = {"type",        "hooks", "metrics",
                                         "wrap_policy", "loss",  "comm_hook"};
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
    node->text = lower(node->text.substr(node->text.rfind('.') + 1));  // BackwardPrefetch.…
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

void suggest_own_names(const ConfigNode& root, const std::string& error) {
  if (const auto end = error.find(": unknown key"); end != error.npos) {
    const auto begin = error.rfind(": ", end - 1) + 2;
    for (const auto& [theirs, own] : kForeignKeys)
      if (is_one_of(error.substr(begin, end - begin), theirs))
        throw UsageError(error.substr(0, end) + ": no key here; expected " + own);
  }
  refuse_types(root, "", "");
}

void use_own_spellings(ConfigNode& root) {
  use_own_spellings_of_wrapper(root, "");
  if (ConfigNode* models = root.find("models"))
    for (auto& [name, model] : models->members)
      use_own_spellings_of_wrapper(model, "models." + name + ".");
}

}  // namespace tessera::train
