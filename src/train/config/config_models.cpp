#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/save_weights.h"
#include "tessera/train/registries.h"
#include "train/config/config_sections.h"

// Section models: several models, each with the sections that one model has.

namespace tessera::train {
namespace {

/// Names are parts of keys, of files and of the parameters' names.
bool is_name(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char letter) {
    return std::isalnum(letter) != 0 || letter == '_' || letter == '-';
  });
}

/// "out/gan-critic.safetensors" of "out/gan.safetensors", and "out/critic/" of "out/".
std::string path_of(const std::string& path, const std::string& name) {
  if (path.empty()) return "";
  if (is_weights_folder(path)) return path + name + "/";
  std::filesystem::path file(path);
  file.replace_filename(file.stem().string() + "-" + name + file.extension().string());
  return file.string();
}

/// A model without a section of its own is wrapped by the section of the run.
void read_own_parallel(OptionReader& keys, const ParallelConfig& run, ParallelConfig& own) {
  own.type = run.type;
  own.plan = run.plan;
  if (keys.node() == nullptr) return;
  for (const char* key : {"backend", "timeout", "check_results", "local_sgd"})
    keys.refuse(key, fmt::format("belongs to the run; expected parallel.{}", key));
  read_wrapper(keys, own);
}

ModelSections read_entry(OptionReader& keys, const std::string& name, const Config& config) {
  ModelSections own;
  own.name = name;
  own.file = config.file;
  own.where = config.where;
  OptionReader entry = keys.map(name);
  entry.require("model", "a map: which model to train");
  OptionReader model = entry.map("model"), optimizer = entry.map("optimizer"),
               scheduler = entry.map("scheduler"), parallel = entry.map("parallel"),
               train = entry.map("train");
  entry.finish();
  read_model(model, own.model);
  read_own_parallel(parallel, config.parallel, own.parallel);
  read_optimizer(optimizer, own);
  own.scheduler = read_scheduler(scheduler);
  read_step(train, own.train);
  read_ema(train, own.train.ema);
  train.finish();
  return own;
}

void check_names(const OptionReader& keys, const std::vector<std::string>& names,
                 const Config& config) {
  const auto& wanted = config.train_step.models;
  for (const auto& name : names) {
    if (!is_name(name))
      keys.fail(name, "\"" + name + "\" as the name of a model; expected letters, digits, _ and -");
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), name) == wanted.end())
      keys.fail(name, "no model of this train_step" + suggestion(name, wanted));
  }
  for (const auto& name : wanted)
    if (std::find(names.begin(), names.end(), name) == names.end())
      throw UsageError(
          config.at("models") + "lacks " + name +
          fmt::format("; expected the models of this train_step: {}", fmt::join(wanted, ", ")));
}

/// All models are on one device.
void check_devices(const Config& config) {
  const ModelSections& first = config.models.front();
  for (const auto& own : config.models)
    if (own.model.device != first.model.device)
      throw UsageError(own.at("model.device") + own.model.device + ", and " + first.prefix() +
                       "model.device is " + first.model.device +
                       "; expected the same for all models");
}

void check_evaluations(const Config& config) {
  const auto fail = [&](const std::string& key, const char* lacks) {
    throw UsageError(config.at(key) + "there are no evaluations, because the train_step has no " +
                     lacks + "; expected one, or no " + key);
  };
  if (!config.evaluates() && config.train.eval.every > 0) fail("train.eval_every", "evaluate()");
  if (config.metrics.empty()) return;
  if (!config.evaluates()) fail("metrics", "evaluate()");
  if (!config.train_step.predict) fail("metrics", "predict()");
}

}  // namespace

void refuse_beside_models(OptionReader& keys) {
  for (const char* key : {"model", "optimizer", "scheduler"})
    keys.refuse(key, fmt::format("models is given, too; expected models.NAME.{}", key));
  keys.require("train_step", "the name of a train step of the program");
  if (registry::train_steps().names().empty())
    keys.refuse("train_step",
                "this program has no train steps; expected one that adds its own to "
                "registry::train_steps(), as docs/models.md shows");
  keys.refuse("loss",
              "models is given, too, and its train_step computes the losses; expected none");
}

void refuse_train_beside_models(OptionReader& keys) {
  for (const char* key :
       {"clip_grad_norm", "clip_norm_type", "clip_grad_value", "autocast", "loss_scale", "ema"})
    keys.refuse(key, fmt::format("belongs to each of models; expected models.NAME.train.{}", key));
  keys.refuse("accumulation",
              "a train_step of models divides its batch itself; expected StepModel::backward() of "
              "each part, and no train.accumulation");
  keys.refuse("sample",
              "models is given, and none of them is the one that generates; expected none");
}

void read_models(OptionReader& keys, Config& config) {
  const auto names = keys.unread();
  if (names.empty())
    throw UsageError(config.at("models") + "empty; expected a map of models by name");
  if (!config.train_step.train)
    throw UsageError(config.at("train_step") +
                     "it has no train(); expected a function that trains the models");
  check_names(keys, names, config);
  for (const auto& name : names) config.models.push_back(read_entry(keys, name, config));
  keys.finish();
  check_devices(config);
  config.model.device = config.models.front().model.device;
  config.model.seed = config.models.front().model.seed;
}

void finish_models(Config& config) {
  if (config.models.empty()) return;
  const RunConfig& run = config.train;
  for (auto& own : config.models) {
    own.train.save = path_of(run.save, own.name);
    own.train.save_optimizer = path_of(run.save_optimizer, own.name);
    own.train.max_shard_bytes = run.max_shard_bytes;
    own.train.save_config = run.save_config;
    if (!run.save_optimizer.empty() && own.train.ema.decay)
      throw UsageError(config.at("train.save_optimizer") +
                       "belongs to the weights before averaging, and train.save has those of " +
                       own.prefix() + "train.ema; expected one of the two");
  }
  if (config.data.uneven == "join")
    throw UsageError(config.at("data.uneven") +
                     "join: a train_step of models cannot be followed by a rank without data; "
                     "expected error or drop");
  check_evaluations(config);
}

}  // namespace tessera::train
