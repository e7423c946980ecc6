#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/data.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/models/gpt2.h"
#include "tessera/option_map.h"
#include "tessera/process_group.h"

// What `tessera train` is told: a YAML file and `key=value` words, as plain structs. docs/config.md lists the keys.
// Local to the calling rank: no collectives. Relative paths are relative to the working directory.

namespace tessera {

struct ModelConfig {
  std::string type = "GPT2";
  GPT2Options gpt2;
  std::string init;  ///< safetensors file of the initial weights; empty: drawn from gpt2.seed
};

struct DataConfig {
  std::string type;                    ///< "ByteText" or "TokenBin"
  std::vector<std::string> paths;      ///< TokenBin: exactly one
  std::vector<std::string> val_paths;  ///< TokenBin: at most one. When given, all of `paths` is training data.
  double val_fraction = 0.1;           ///< ByteText without val_paths: the last part, for evaluation
  BatchOptions batches;                ///< global_batch is `train.global_batch`
  std::string uneven = "error";        ///< "error", "drop" or "join": what a world does that does not divide global_batch
};

struct OptimizerConfig {
  std::string type;
  OptionMap options;  ///< checked against the registry's options of `type`
};

/// Learning rate of step s, where lr is the optimizer's: lr · (s + 1) / warmup_steps while s < warmup_steps, then lr
/// ("constant") or min_lr + (lr − min_lr) · (1 + cos(π · (s − warmup_steps) / (decay_steps − warmup_steps))) / 2
/// ("warmup_cosine"), and min_lr from decay_steps on.
struct SchedulerConfig {
  std::string type = "none";  ///< "none", "constant" or "warmup_cosine"
  int64_t warmup_steps = 0;
  int64_t decay_steps = 0;  ///< 0: train.steps
  double min_lr = 0;

  double lr_at(int64_t step, double lr, int64_t train_steps) const;
};

struct ParallelConfig {
  /// "none", "DistributedDataParallel", "ZeroRedundancyOptimizer", "DistributedOptimizer" or "FullyShardedDataParallel"
  std::string type = "none";
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;  ///< DistributedDataParallel
  bool find_unused_parameters = false;
  bool static_graph = false;              ///< DistributedDataParallel
  bool broadcast_buffers = true;          ///< DistributedDataParallel
  bool gradient_as_bucket_view = true;    ///< DistributedDataParallel
  std::string comm_hook = "none";         ///< DistributedDataParallel: "none", "fp16", "bf16" or "power_sgd"
  int64_t power_sgd_rank = 1;             ///< with comm_hook power_sgd; as PowerSgdOptions
  int64_t power_sgd_start_iteration = 1000;
  double power_sgd_min_compression_rate = 2;
  std::string partition = "flat";         ///< ZeroRedundancyOptimizer: "flat", "whole" or "first_fit"
  bool overlap_with_backward = false;     ///< ZeroRedundancyOptimizer
  bool parameters_as_bucket_view = true;  ///< ZeroRedundancyOptimizer
  std::string reduce_method;              ///< DistributedOptimizer: "sum" or "mean", in any case
  int64_t bcast_period = 0;               ///< DistributedOptimizer
  bool param_pack = false;                ///< DistributedOptimizer
  int64_t param_pack_thd = 10 << 20;      ///< DistributedOptimizer: bytes
  FullyShardedDataParallelOptions fsdp;   ///< FullyShardedDataParallel
  std::string wrap_policy = "size_based"; ///< FullyShardedDataParallel: what made fsdp.wrap_policy
  ProcessGroupOptions group;              ///< backend and timeout
};

/// Generated text at the end; `length` 0: none.
struct SampleConfig {
  int64_t length = 0;
  std::vector<int64_t> prompt{'T', 'h', 'e', ' '};
  GPT2SampleOptions options;
  uint64_t seed = 0;
};

struct RunConfig {
  int64_t steps = 0;
  int64_t global_batch = 0;
  std::string log;                       ///< JSON lines; empty: none
  int64_t log_every = 1;                 ///< printed lines; the file has every step
  std::string save;                      ///< safetensors of the final weights; empty: none
  bool save_config = false;              ///< config.json of Hugging Face beside `save`
  int64_t eval_every = 0;                ///< 0: only at the end
  int64_t eval_batches = 0;              ///< global batches an evaluation looks at; 0: all windows
  std::optional<double> clip_grad_norm;  ///< nothing is clipped without it
  SampleConfig sample;
};

struct Config {
  ModelConfig model;
  DataConfig data;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  ParallelConfig parallel;
  RunConfig train;

  /// "file.yaml:12: data.path: ", the start of a message about a key; the file alone for a key that was not given.
  std::string at(const std::string& key) const;

  std::string file;
  std::map<std::string, std::string> where;  ///< dotted key to "file.yaml:12" or "command line"
};

/// Reads `file`, applies `overrides` ("dotted.key=YAML value", in order), checks everything that can be checked without
/// the world and the data. Throws UsageError with file (or "command line"), line, dotted key, value, what was expected,
/// and the nearest known key. Unread files: over 1 MiB, nested deeper than 32 levels, more than 10,000 values with
/// aliases expanded.
Config load_config(const std::string& file, const std::vector<std::string>& overrides = {});

/// That the files which `config` names for reading exist and can be read; throws UsageError as load_config does.
void check_config_files(const Config& config);

/// What does not fit a world of `world_size` ranks: a batch that it does not divide, `parallel.type: none` with
/// several.
void check_config_world(const Config& config, int world_size);

}  // namespace tessera
