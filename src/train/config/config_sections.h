#pragma once

#include "tessera/train/config.h"

// One function per section of the config. Later sections depend on values of earlier ones.

namespace tessera::train {

/// "model.n_embd" for {"model", "n_embd"}.
std::string dotted(const std::vector<std::string>& path);

/// Reads all sections.
void read_config(OptionReader& keys, Config& config);

void read_model(OptionReader& keys, ModelConfig& model);
void read_optimizer(OptionReader& keys, ModelSections& own);
LrSchedule read_scheduler(OptionReader& keys);
/// Clipping and precision of section train.
void read_step(OptionReader& keys, RunConfig& run);
void read_ema(OptionReader& keys, EmaConfig& ema);
/// `config`: the sections that were read before.
void read_train(OptionReader& keys, const Config& config, RunConfig& run);
void read_checkpoint(OptionReader& keys, CheckpointConfig& checkpoint);
/// Keys `metric` and `mode`.
void read_ranking(OptionReader& keys, Ranking& ranking);

/// UsageError for a config without datasets.
void require_datasets(const Config& config);

/// The key `type` and the keys of the type.
void read_wrapper(OptionReader& keys, ParallelConfig& parallel);

/// Section models. The sections that all models share, except data and train, are read before.
void read_models(OptionReader& keys, Config& config);
/// The values of the models that follow from data and train.
void finish_models(Config& config);
/// UsageError for keys at the top level, and in section train, that models have themselves.
void refuse_beside_models(OptionReader& keys);
void refuse_train_beside_models(OptionReader& keys);

// These read the keys of a section that do not depend on its type, for the reference.
void describe_top_level(OptionReader& keys);
void describe_model(OptionReader& keys);
void describe_data(OptionReader& keys);
void describe_optimizer(OptionReader& keys);
void describe_metric(OptionReader& keys);
void describe_parallel(OptionReader& keys);

}  // namespace tessera::train
