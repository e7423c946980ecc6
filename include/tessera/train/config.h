#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/process_group.h"
#include "tessera/step/grad_scaler.h"
#include "tessera/train/registries.h"

// What `tessera train` is told: YAML files and `key=value` words, as plain structs and plans.
// docs/config.md lists the keys. Local to the calling rank: no collectives. Relative paths are
// relative to the working directory.

namespace tessera {

struct ModelConfig {
  std::string type;
  ModelPlan plan;
  std::string init;  ///< safetensors file of the initial weights; empty: drawn from `seed`
  uint64_t seed =
      0;  ///< of the initial weights, and of what the model draws in training, each rank its own
  std::string device = "cpu";  ///< "cpu", or "cuda": the device numbered as the rank on its host
};

struct DataConfig {
  std::string type;
  DataPlan plan;
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;  ///< of the shuffling
  std::string uneven =
      "error";  ///< "error", "drop" or "join": what a world does that does not divide global_batch
  int loader_threads = 1;
  int prefetch = 2;  ///< batches loaded ahead; 0: loaded when they are needed
};

struct ParallelConfig {
  std::string type = "none";
  WrapperPlan plan;
  ProcessGroupOptions group;  ///< backend and timeout
};

/// Generated text at the end; `length` 0: none.
struct SampleConfig {
  int64_t length = 0;
  std::vector<int64_t> prompt{'T', 'h', 'e', ' '};
  double temperature = 1;  ///< 0: always the likeliest token
  int64_t top_k = 0;       ///< draw among the k likeliest; 0: among all
  uint64_t seed = 0;
};

/// Weight average; none without `decay`.
struct EmaConfig {
  std::optional<double> decay;
  bool warmup = false;
};

struct EarlyStopConfig {
  int64_t patience = 0;  ///< evaluations without an improvement; 0: never stops
  double min_delta = 0;
};

struct CheckpointConfig {
  std::string folder;  ///< empty: no checkpoints
  int64_t every = 0;   ///< steps; 0: at the end and when interrupted
  int64_t keep_last = 2;
  int64_t keep_every = 0;  ///< steps; 0: none beyond keep_last
  bool resume = true;      ///< go on from the newest one in `folder`, when there is one
  std::string from;        ///< one checkpoint to start from instead, of any run
};

struct RunConfig {
  int64_t steps = 0;
  double epochs = 0;  ///< in place of steps; 0: steps count
  int64_t global_batch = 0;
  int64_t accumulation = 1;              ///< parts in which a rank works off its share of a batch
  std::string log;                       ///< JSON lines; empty: none
  int64_t log_every = 1;                 ///< printed lines; the file has every step
  std::string save;                      ///< safetensors of the final weights; empty: none
  bool save_config = false;              ///< config.json of Hugging Face beside `save`
  int64_t eval_every = 0;                ///< 0: only at the end
  int64_t eval_batches = 0;              ///< global batches an evaluation looks at; 0: all samples
  std::optional<double> clip_grad_norm;  ///< nothing is clipped without it
  std::optional<double> clip_grad_value;
  std::optional<at::ScalarType> autocast;
  GradScalerOptions loss_scale{.enabled = false};
  EmaConfig ema;
  EarlyStopConfig early_stop;
  SampleConfig sample;
};

struct Config {
  ModelConfig model;
  DataConfig data;
  LossFunction loss;          ///< empty: the model's own
  Preprocessor preprocessor;  ///< empty: none
  OptimizerPlan optimizer;
  LrSchedule scheduler;
  ParallelConfig parallel;
  RunConfig train;
  CheckpointConfig checkpoint;
  std::vector<std::function<std::shared_ptr<RunHook>()>> hooks;

  /// "file.yaml:12: data.path: ", the start of a message about a key; the file alone for a key that
  /// was not given.
  std::string at(const std::string& key) const;
  /// The value that holds, as YAML: given or default. Throws UsageError for a key that nobody
  /// reads.
  std::string value(const std::string& key) const;
  /// YAML that loads as this config: every option with the value that holds, or only those that
  /// differ from their defaults.
  std::string dump(bool full) const;

  std::string file;
  std::map<std::string, std::string> where;  ///< dotted key to "file.yaml:12" or "command line"
  std::shared_ptr<const OptionRecord> options;
};

/// Reads `file` with its bases, applies `overrides` ("dotted.key=YAML value", in order), checks
/// everything that can be checked without the world and the data. Components are looked up in the
/// registries. Throws UsageError with file (or "command line"), line, dotted key, value, what was
/// expected, and the nearest known key. Unread files: over 1 MiB, nested deeper than 32 levels,
/// more than 10,000 values with aliases expanded.
Config load_config(const std::string& file, const std::vector<std::string>& overrides = {});

/// That the files which `config` names for reading exist and can be read; throws UsageError as
/// load_config does.
void check_config_files(const Config& config);

/// What does not fit a world of `world_size` ranks: a batch that it does not divide,
/// `parallel.type: none` with several.
void check_config_world(const Config& config, int world_size);

/// The reference of all sections and registered components, as Markdown.
std::string config_reference();

}  // namespace tessera
