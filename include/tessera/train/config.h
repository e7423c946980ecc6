#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/local_sgd.h"
#include "tessera/process_group.h"
#include "tessera/step/grad_scaler.h"
#include "tessera/train/registries.h"
#include "tessera/train/train_step.h"
#include "tessera/weights/weights.h"

// The config of `tessera train`, from YAML files and `key=value` arguments, as plain structs.
// docs/config_reference.md lists the keys. All functions are local. Relative paths are relative to
// the working directory.

#pragma GCC visibility push(default)
namespace tessera {

/// Parameters that are not trained, or not before a step.
struct FreezeRule {
  std::vector<std::string> patterns;  ///< of their names
  int64_t until = 0;                  ///< the first step that trains them; 0: none does
};

struct ModelConfig {
  std::string type;
  ModelPlan plan;
  std::vector<FreezeRule> freeze;
  std::string init;  ///< file, index or folder of the initial weights (see Weights); empty: random
                     ///< from `seed`
  WeightsOptions init_options;  ///< how the weights are read
  bool strict = true;           ///< whether names that are missing or unexpected are an error
  /// Seed of the initial weights and of each rank's random numbers in training.
  uint64_t seed = 0;
  /// True: parameters take memory only where and when the wrapper needs them; see deferred_init().
  /// Unset: true for FullyShardedDataParallel on CPUs.
  std::optional<bool> deferred = {};
  /// "cpu", "cuda" (the device numbered as the rank on its host), "cuda:1", … (train/devices.h)
  std::string device = "cpu";
  /// Parameters and floating-point buffers are converted to it; unset: as the model makes them.
  std::optional<at::ScalarType> param_dtype = {};
};

struct DataConfig {
  std::string type;  ///< empty: no section `data`; for TrainingSession
  DataPlan plan;
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;  ///< of the shuffling
  /// "error", "drop" or "join": behaviour when the world size does not divide global_batch.
  std::string uneven = "error";
  int loader_threads = 1;
  int prefetch = 2;  ///< batches loaded ahead; 0: each batch is loaded when it is needed
};

/// Groups of ranks that train apart and are synchronised every few steps (tessera/local_sgd.h).
struct LocalSgdConfig {
  LocalSgdOptions options;
  int64_t groups = 0;  ///< number of groups of consecutive ranks; 0: one for each host
};

struct ParallelConfig {
  std::string type = "none";
  WrapperPlan plan;
  ProcessGroupOptions group;                ///< backend and timeout
  std::optional<LocalSgdConfig> local_sgd;  ///< no value: all ranks train together
};

/// Text that is generated at the end of the run; `length` 0: none.
struct SampleConfig {
  int64_t length = 0;
  std::vector<int64_t> prompt{'T', 'h', 'e', ' '};
  double temperature = 1;  ///< 0: always the most likely token
  int64_t top_k = 0;       ///< sample from the k most likely tokens; 0: from all
  uint64_t seed = 0;
};

/// Moving average of the weights; none without `decay`.
struct EmaConfig {
  std::optional<double> decay;
  bool warmup = false;
};

/// Evaluations after every few steps.
struct EvalConfig {
  int64_t every = 0;    ///< in steps; 0: only at the end
  int64_t batches = 0;  ///< global batches per evaluation; 0: all samples
  int64_t batch = 8;    ///< samples of a rank in one forward
};

/// The order of evaluations.
struct Ranking {
  std::string metric = "loss";  ///< a figure of the evaluation: loss, or one of Config::metrics
  bool larger = false;          ///< larger values are better
};

struct EarlyStopConfig {
  int64_t patience = 0;  ///< evaluations without an improvement; 0: never stops
  double min_delta = 0;
  Ranking ranking;
};

/// The checkpoints of the best evaluations, which are kept beside the newest ones.
struct KeepBestConfig {
  int64_t count = 0;  ///< 0: none
  Ranking ranking;
};

struct CheckpointConfig {
  std::string folder;  ///< empty: no checkpoints
  int64_t every = 0;   ///< in steps; 0: only at the end and when interrupted
  int64_t keep_last = 2;
  int64_t keep_every = 0;  ///< in steps; 0: none beyond keep_last
  KeepBestConfig keep_best;
  bool resume = true;  ///< continue from the newest checkpoint in `folder`, if there is one
  /// A newest checkpoint that is damaged is set aside, and the one before it is taken. No value: on
  /// under `tessera run --max-restarts`, otherwise off.
  std::optional<bool> fallback;
  /// True if the optimizer state of the checkpoint is used; false starts a new one.
  bool optimizer = true;
  std::string from;  ///< a checkpoint of any run to start from, unless `folder` has one
  /// True if rank 0 writes all weights to weights.safetensors. Otherwise every rank writes its
  /// part.
  bool single_file = false;
};

/// A rank without progress writes its stacks and ends.
struct WatchdogConfig {
  std::optional<double> factor = 20;  ///< of the median of step times; no value: no watchdog
  double least = 300;                 ///< s; a step is never bounded more tightly
  /// Longest time in s without progress outside of steps: start-up with the first step, each hook,
  /// each round of an evaluation, each tensor of a checkpoint.
  double other = 3600;
};

struct RunConfig {
  int64_t steps = 0;
  double epochs = 0;  ///< used instead of `steps`; 0: `steps` is used
  int64_t global_batch = 0;
  int64_t accumulation = 1;      ///< micro-batches per step on each rank
  std::string log;               ///< file of JSON lines; empty: none
  int64_t log_every = 1;         ///< steps per printed line, 0: none; the file has every step
  std::string save;              ///< file or "folder/" of the final weights; empty: none
  std::string save_optimizer;    ///< file of torch.save for its state; empty: none
  uint64_t max_shard_bytes = 0;  ///< of each file in a folder `save`; 0: any number
  bool save_config = false;      ///< write Hugging Face's config.json next to `save`
  EvalConfig eval;
  std::optional<double> clip_grad_norm;  ///< no value: no clipping by norm
  std::optional<double> clip_grad_value;
  double clip_norm_type = 2;        ///< p of clip_grad_norm and of the reported norm
  bool error_if_nonfinite = false;  ///< a norm that is infinite or NaN ends the run
  /// "stop", "skip" or "rollback": the reaction to a loss or a gradient that is not finite.
  std::string on_nonfinite = "stop";
  int64_t nonfinite_limit = 10;  ///< most steps in a row that are skipped or rolled back
  /// Factor of the median of recent losses; a larger loss is rolled back. No value: none is.
  std::optional<double> rollback_on_spike;
  /// Steps between two comparisons of the tensors that ranks have in common; 0: none.
  int64_t check_replicas = 100;
  bool repair_replicas = false;  ///< see tessera/step/replicas.h
  WatchdogConfig watchdog;
  std::optional<at::ScalarType> autocast;
  GradScalerOptions loss_scale{.enabled = false};
  EmaConfig ema;
  EarlyStopConfig early_stop;
  SampleConfig sample;
};

/// The source of the optimizer's first state.
struct OptimizerInit {
  std::string path;  ///< file of torch.save; empty: the optimizer starts anew
  std::string key;   ///< of the state's dict; see TorchOptimizerStateFile
};

/// The places in files and arguments that gave a config its values.
struct ConfigSource {
  /// "file.yaml:12: data.path: ", the beginning of a message about a key; without the line for a
  /// key that was not given.
  std::string at(const std::string& key) const;
  /// The value in effect (given or default) as YAML. Throws UsageError for an unknown key.
  std::string value(const std::string& key) const;
  /// YAML that loads as this config. `full`: every option with the value in effect; otherwise only
  /// those that differ from their defaults.
  std::string dump(bool full) const;

  /// "models.NAME.", the beginning of this model's keys; empty: the whole config.
  std::string prefix() const { return name.empty() ? "" : "models." + name + "."; }

  std::string name;  ///< of this model in section `models`; empty: the whole config
  std::string file;
  std::map<std::string, std::string> where;  ///< dotted key to "file.yaml:12" or "command line"
  std::shared_ptr<const OptionRecord> options;
};

/// The sections that each model has. In an entry of `models`, at() takes "model.type" and returns
/// the place of "models.NAME.model.type".
struct ModelSections : ConfigSource {
  ModelConfig model;
  OptimizerPlan optimizer;
  OptimizerInit optimizer_init;
  LrSchedule scheduler;
  ParallelConfig parallel;
  RunConfig train;  ///< of an entry: clipping, precision, ema and the files are its own
};

struct Config : ModelSections {
  /// The models that are trained: the entries of section `models`, or this config as the only one.
  std::vector<const ModelSections*> trained() const;
  /// True if evaluations give losses; false with a train_step that has none.
  bool evaluates() const { return models.empty() || train_step.evaluate; }

  /// With several models, the members of ModelSections have the options that all share:
  /// model.device, model.seed, parallel.group, and train without the keys of single models.
  std::vector<ModelSections> models;
  TrainStep train_step;  ///< with `models`
  DataConfig data;
  LossFunction loss;          ///< empty: the model's own
  Preprocessor preprocessor;  ///< empty: none
  std::vector<Metric> metrics;
  CheckpointConfig checkpoint;
  std::vector<std::function<std::shared_ptr<RunHook>()>> hooks;
};

/// Reads `file` with its bases, applies `overrides` ("dotted.key=YAML value") in order and checks
/// everything that can be checked without the world and the data. Components are looked up in the
/// registries. Throws UsageError with the file (or "command line"), the line, the dotted key, the
/// value, what was expected and the nearest known key. Refuses files over 1 MiB, nested deeper than
/// 32 levels, or with more than 10,000 values after aliases are expanded.
Config load_config(const std::string& file, const std::vector<std::string>& overrides = {});
/// The same for the text of a config, without bases. Errors begin with "config:line".
Config parse_config(const std::string& text, const std::vector<std::string>& overrides = {});

/// Throws UsageError, in the form of load_config's, unless the files that the config names for
/// reading exist and can be read.
void check_config_files(const Config& config);

/// Throws UsageError when the config does not fit a world of `world_size` ranks: a global batch or
/// an accumulation that it does not divide, or `parallel.type: none` with several ranks.
void check_config_world(const Config& config, int world_size);

/// The reference of all sections and registered components, as Markdown: docs/config_reference.md.
std::string config_reference();

}  // namespace tessera
#pragma GCC visibility pop
