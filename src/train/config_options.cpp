#include "train/config_sections.h"

#include <algorithm>
#include <cctype>
#include <cmath>

#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera::train {
namespace {

constexpr const char* kDdp = "DistributedDataParallel";
constexpr const char* kZero = "ZeroRedundancyOptimizer";
constexpr const char* kDistributed = "DistributedOptimizer";
constexpr const char* kFsdp = "FullyShardedDataParallel";

OptionValue option_value(const ConfigNode& node, const std::string& path) {
  if (node.kind == ConfigNode::Kind::Sequence) {
    std::vector<double> values;
    for (const auto& item : node.items) {
      const auto value = parse_number(item);
      if (!value) {
        fail_at(item, path, item.describe() + " in a list; expected numbers");
      }
      values.push_back(*value);
    }
    return values;
  }
  if (node.kind != ConfigNode::Kind::Scalar) {
    fail_at(node, path, node.describe() + "; expected a number, true or false, a word, or a list of numbers");
  }
  if (const auto flag = parse_bool(node)) return *flag;
  if (const auto whole = parse_integer(node)) return *whole;
  if (const auto number = parse_number(node)) return *number;
  return node.text;
}

Backend backend_of(const std::string& name) {
  if (name == "shm") return Backend::SharedMemory;
  if (name == "gloo") return Backend::Gloo;
  if (name == "nccl") return Backend::NCCL;
  if (name == "mpi") return Backend::MPI;
  return Backend::Auto;
}

/// Refuses the keys of `owner` unless that is the chosen type.
void refuse_unless(MapReader& keys, const std::string& type, const std::string& owner,
                   std::initializer_list<const char*> names) {
  if (type != owner) {
    for (const char* name : names) {
      keys.refuse(name, "an option of " + owner + ", and parallel.type is " + type);
    }
  }
}

void read_distributed(MapReader& keys, ParallelConfig& parallel) {
  keys.require("reduce_method", "sum or mean");
  keys.read("reduce_method", parallel.reduce_method);
  std::string method = parallel.reduce_method;
  std::transform(method.begin(), method.end(), method.begin(), [](unsigned char c) { return std::tolower(c); });
  if (keys.has("reduce_method") && method != "sum" && method != "mean") {
    keys.fail("reduce_method", "\"" + parallel.reduce_method + "\"; expected sum or mean");
  }
  keys.read("bcast_period", parallel.bcast_period, Range{-1});
  keys.read("param_pack", parallel.param_pack);
  keys.read("param_pack_thd", parallel.param_pack_thd, Range{1});
}

void read_wrap_policy(MapReader keys, ParallelConfig& parallel) {
  const auto policies = default_wrap_policies();
  keys.read_choice("type", parallel.wrap_policy, policies.names());
  OptionMap options;
  for (const auto& key : keys.unread()) {
    options[key] = option_value(*keys.take(key), keys.full(key));
  }
  try {
    parallel.fsdp.wrap_policy = policies.make(parallel.wrap_policy, options);
  } catch (const UsageError& error) {
    keys.fail("type", error.what());
  }
  keys.finish();
}

void read_dtype(MapReader& keys, const std::string& key, std::optional<at::ScalarType>& out) {
  static const std::vector<std::pair<std::string, at::ScalarType>> kTypes{
      {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"float64", at::kDouble}};
  std::vector<std::string> names;
  for (const auto& [name, type] : kTypes) names.push_back(name);
  std::string chosen;
  keys.read_choice(key, chosen, names);
  for (const auto& [name, type] : kTypes) {
    if (name == chosen) out = type;
  }
}

template <class Choice>
void read_named(MapReader& keys, const std::string& key, Choice& out, const std::vector<std::pair<std::string, Choice>>& choices) {
  std::vector<std::string> names;
  std::string chosen;
  for (const auto& [name, choice] : choices) names.push_back(name);
  keys.read_choice(key, chosen, names);
  for (const auto& [name, choice] : choices) {
    if (name == chosen) out = choice;
  }
}

void read_fsdp(MapReader& keys, ParallelConfig& parallel) {
  auto& fsdp = parallel.fsdp;
  read_wrap_policy(keys.map("wrap_policy"), parallel);
  read_named(keys, "sharding_strategy", fsdp.sharding_strategy,
             {{"full_shard", ShardingStrategy::full_shard}, {"shard_grad_op", ShardingStrategy::shard_grad_op},
              {"no_shard", ShardingStrategy::no_shard}, {"hybrid_shard", ShardingStrategy::hybrid_shard}});
  int64_t group = fsdp.shard_group_size;
  keys.read("shard_group_size", group, Range{0, 1e6});
  fsdp.shard_group_size = static_cast<int>(group);
  keys.read("resident_bytes", fsdp.resident_bytes, kNotNegative);
  keys.read("reshard_after_forward", fsdp.reshard_after_forward);
  read_named(keys, "backward_prefetch", fsdp.backward_prefetch,
             {{"pre", BackwardPrefetch::pre}, {"post", BackwardPrefetch::post}, {"none", BackwardPrefetch::none},
              {"BACKWARD_PRE", BackwardPrefetch::pre}, {"BACKWARD_POST", BackwardPrefetch::post}});
  keys.read("forward_prefetch", fsdp.forward_prefetch);
  keys.read("cpu_offload", fsdp.cpu_offload);
  auto mixed = keys.map("mixed_precision");
  read_dtype(mixed, "param_dtype", fsdp.mixed_precision.param_dtype);
  read_dtype(mixed, "reduce_dtype", fsdp.mixed_precision.reduce_dtype);
  read_dtype(mixed, "buffer_dtype", fsdp.mixed_precision.buffer_dtype);
  mixed.finish();
}

}  // namespace

void read_parallel(MapReader keys, ParallelConfig& parallel) {
  keys.read_choice("type", parallel.type, {"none", kDdp, kZero, kDistributed, kFsdp});
  std::string backend = "auto";
  keys.read_choice("backend", backend, {"auto", "shm", "gloo", "nccl", "mpi"});
  parallel.group.backend = backend_of(backend);
  double seconds = static_cast<double>(parallel.group.timeout.count()) / 1000;
  keys.read("timeout", seconds, Range{0.001, 1e6});
  parallel.group.timeout = std::chrono::milliseconds(std::llround(seconds * 1000));

  const std::string& type = parallel.type;
  if (type == kDdp) {
    keys.read("first_bucket_mb", parallel.first_bucket_mb, kPositive);
    keys.read("static_graph", parallel.static_graph);
    keys.read("broadcast_buffers", parallel.broadcast_buffers);
    keys.read("gradient_as_bucket_view", parallel.gradient_as_bucket_view);
    keys.read_choice("comm_hook", parallel.comm_hook, {"none", "fp16", "bf16", "power_sgd"});
  }
  if (parallel.comm_hook == "power_sgd") {
    keys.read("power_sgd_rank", parallel.power_sgd_rank, Range{1});
    keys.read("power_sgd_start_iteration", parallel.power_sgd_start_iteration, kNotNegative);
    keys.read("power_sgd_min_compression_rate", parallel.power_sgd_min_compression_rate, kPositive);
  } else if (type == kDdp) {
    for (const char* name : {"power_sgd_rank", "power_sgd_start_iteration", "power_sgd_min_compression_rate"}) {
      keys.refuse(name, "an option of comm_hook power_sgd, and parallel.comm_hook is " + parallel.comm_hook);
    }
  }
  if (type == kZero) {
    keys.read_choice("partition", parallel.partition, {"flat", "whole", "first_fit"});
    keys.read("overlap_with_backward", parallel.overlap_with_backward);
    keys.read("parameters_as_bucket_view", parallel.parameters_as_bucket_view);
  }
  if (type == kDistributed) {
    read_distributed(keys, parallel);
  }
  if (type == kFsdp) {
    read_fsdp(keys, parallel);
  }
  if (type == kDdp || type == kZero) {
    keys.read("bucket_cap_mb", parallel.bucket_cap_mb, kPositive);
    keys.read("find_unused_parameters", parallel.find_unused_parameters);
  }
  if (type == kDistributed) {
    for (const char* name : {"bucket_cap_mb", "find_unused_parameters"}) {
      keys.refuse(name, std::string("no option of DistributedOptimizer, which packs by param_pack and param_pack_thd"));
    }
  }
  refuse_unless(keys, type, kDdp,
                {"first_bucket_mb", "static_graph", "broadcast_buffers", "gradient_as_bucket_view", "comm_hook",
                 "power_sgd_rank", "power_sgd_start_iteration", "power_sgd_min_compression_rate"});
  refuse_unless(keys, type, kDistributed, {"reduce_method", "bcast_period", "param_pack", "param_pack_thd"});
  refuse_unless(keys, type, kFsdp,
                {"wrap_policy", "sharding_strategy", "shard_group_size", "resident_bytes", "reshard_after_forward",
                 "backward_prefetch", "forward_prefetch", "cpu_offload", "mixed_precision"});
  refuse_unless(keys, type, kZero, {"partition", "overlap_with_backward", "parameters_as_bucket_view"});
  keys.finish();
}

void read_optimizer(MapReader keys, OptimizerConfig& optimizer) {
  const OptimizerRegistry registry = default_optimizers();
  keys.require("type", "the name of an optimizer");
  keys.read_choice("type", optimizer.type, registry.names());
  if (optimizer.type.empty()) {
    // Without a type no option can be judged: only the missing type is reported.
    for (const auto& key : keys.unread()) {
      keys.take(key);
    }
    keys.finish();
    return;
  }
  if (optimizer.type == "LBFGS") {
    keys.fail("type", "LBFGS evaluates the loss several times a step, and the trainer does once; expected another");
  }
  for (const KnownOption& option : registry.known_options(optimizer.type)) {
    const ConfigNode* node = keys.take(option.name);
    if (node == nullptr) {
      continue;
    }
    const OptionValue value = option_value(*node, keys.full(option.name));
    try {
      registry.complete(optimizer.type, {{option.name, value}});
    } catch (const UsageError& error) {
      fail_at(*node, keys.full(option.name), error.what());
    }
    optimizer.options[option.name] = value;
  }
  keys.finish();
}

}  // namespace tessera::train
