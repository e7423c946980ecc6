#include "tessera/config.h"

#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <numbers>

#include "tessera/error.h"
#include "train/config_sections.h"
#include "train/config_reader.h"

namespace tessera {
namespace {

using train::ConfigNode;
using train::MapReader;

void note_places(const ConfigNode& node, const std::string& path, std::map<std::string, std::string>& where) {
  for (const auto& member : node.members) {
    const std::string key = path.empty() ? member.key : path + "." + member.key;
    where[key] = member.value.where;
    note_places(member.value, key, where);
  }
}

void check_readable(const Config& config, const std::string& key, const std::string& path) {
  if (path.find_first_of("*?[") == std::string::npos && ::access(path.c_str(), R_OK) != 0) {
    throw UsageError(config.at(key) + path + ": " + std::strerror(errno) + "; expected a readable file");
  }
}

}  // namespace

std::string Config::at(const std::string& key) const {
  const auto found = where.find(key);
  return (found == where.end() ? file : found->second) + ": " + key + ": ";
}

double SchedulerConfig::lr_at(int64_t step, double lr, int64_t train_steps) const {
  if (step < warmup_steps) {
    return lr * static_cast<double>(step + 1) / static_cast<double>(warmup_steps);
  }
  if (type != "warmup_cosine") {
    return lr;
  }
  const int64_t end = decay_steps > 0 ? decay_steps : train_steps;
  if (step >= end) {
    return min_lr;
  }
  const double progress = static_cast<double>(step - warmup_steps) / static_cast<double>(end - warmup_steps);
  return min_lr + (lr - min_lr) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

Config load_config(const std::string& file, const std::vector<std::string>& overrides) {
  ConfigNode root = train::parse_yaml_file(file);
  root.where = file;
  for (const auto& assignment : overrides) {
    train::apply_override(root, assignment);
  }
  Config config;
  config.file = file;
  note_places(root, "", config.where);

  MapReader keys(&root, "", file);
  keys.require("model", "a map: which model to train");
  keys.require("data", "a map: the training data");
  keys.require("optimizer", "a map: the optimizer and its options");
  keys.require("train", "a map: steps, global_batch and outputs");
  MapReader model = keys.map("model"), data = keys.map("data"), optimizer = keys.map("optimizer"),
            scheduler = keys.map("scheduler"), parallel = keys.map("parallel"), run = keys.map("train");
  keys.finish();
  train::read_model(std::move(model), config.model);
  train::read_data(std::move(data), config.model, config.data);
  train::read_optimizer(std::move(optimizer), config.optimizer);
  train::read_scheduler(std::move(scheduler), config.scheduler);
  train::read_parallel(std::move(parallel), config.parallel);
  train::read_train(std::move(run), config, config.train);
  if (config.parallel.overlap_with_backward && config.train.clip_grad_norm) {
    throw UsageError(config.at("train.clip_grad_norm") +
                     "the norm is known only after backward, and parallel.overlap_with_backward updates during it; "
                     "expected one of the two");
  }
  config.data.batches.global_batch = config.train.global_batch;
  return config;
}

void check_config_files(const Config& config) {
  for (const auto& path : config.data.paths) {
    check_readable(config, "data.path", path);
  }
  for (const auto& path : config.data.val_paths) {
    check_readable(config, "data.val_path", path);
  }
  if (!config.model.init.empty()) {
    check_readable(config, "model.init", config.model.init);
  }
}

void check_config_world(const Config& config, int world_size) {
  const int64_t batch = config.train.global_batch;
  if (batch % world_size != 0 && config.data.uneven == "error") {
    throw UsageError(config.at("train.global_batch") + std::to_string(batch) + " sequences cannot be divided by " +
                     std::to_string(world_size) + " ranks; expected a multiple of " + std::to_string(world_size));
  }
  if (config.parallel.type == "none" && world_size > 1) {
    throw UsageError(config.at("parallel.type") + "none, but the world has " + std::to_string(world_size) +
                     " ranks, and each would train a model of its own; expected DistributedDataParallel, "
                     "ZeroRedundancyOptimizer, DistributedOptimizer or FullyShardedDataParallel (or one rank)");
  }
}

}  // namespace tessera
