#include "tessera/train/config.h"

#include <cerrno>
#include <cstring>

#include <unistd.h>

#include "tessera/error.h"
#include "tessera/train/registries.h"
#include "train/config/config_sections.h"
#include "train/config/spellings.h"

namespace tessera {
namespace {

void note_places(const ConfigNode& node, const std::string& path,
                 std::map<std::string, std::string>& where) {
  for (const auto& member : node.members) {
    const std::string key = path.empty() ? member.key : path + "." + member.key;
    where[key] = member.value.where;
    note_places(member.value, key, where);
  }
}

std::string wrappers_other_than(const std::string& type) {
  std::string names;
  for (const auto& name : registry::parallel().names())
    if (name != type) names += (names.empty() ? "" : ", ") + name;
  return names;
}

/// Sets the value at `path`, creating missing maps.
void place(ConfigNode& root, const std::vector<std::string>& path, const ConfigNode& value) {
  ConfigNode* node = &root;
  for (const auto& part : path) {
    node->kind = ConfigNode::Kind::Map;
    ConfigNode* next = node->find(part);
    if (next == nullptr) {
      node->members.push_back({part, ConfigNode{}});
      next = &node->members.back().value;
    }
    node = next;
  }
  *node = value;
}

}  // namespace

std::string train::dotted(const std::vector<std::string>& path) {
  std::string text;
  for (const auto& part : path) text += (text.empty() ? "" : ".") + part;
  return text;
}

std::string ConfigSource::at(const std::string& key) const {
  const std::string full = prefix() + key;
  const auto found = where.find(full);
  return (found == where.end() ? file : found->second) + ": " + full + ": ";
}

std::vector<const ModelSections*> Config::trained() const {
  std::vector<const ModelSections*> all;
  for (const auto& each : models) all.push_back(&each);
  if (all.empty()) all.push_back(this);
  return all;
}

std::string ConfigSource::value(const std::string& key) const {
  for (const auto& option : *options) {
    if (train::dotted(option.path) == key) {
      const std::string text = to_yaml(option.value);
      return option.value.kind == ConfigNode::Kind::Scalar ? option.value.text
                                                           : text.substr(0, text.size() - 1);
    }
  }
  throw UsageError("Config: no option " + key);
}

std::string ConfigSource::dump(bool full) const {
  ConfigNode root;
  root.kind = ConfigNode::Kind::Map;
  for (const auto& option : *options) {
    // Required options (types) are always included, so that a minimal config loads.
    if (full || option.required || (option.given && !(option.value == option.standard)))
      place(root, option.path, option.value);
  }
  return to_yaml(root);
}

namespace {

Config config_of(ConfigNode root, const std::string& file,
                 const std::vector<std::string>& overrides) {
  root.where = file;
  for (const auto& assignment : overrides) apply_override(root, assignment);
  expand_environment(root);
  train::use_own_spellings(root);
  Config config;
  config.file = file;
  note_places(root, "", config.where);
  const auto record = std::make_shared<OptionRecord>();
  OptionReader keys(&root, {}, file, record);
  try {
    train::read_config(keys, config);
  } catch (const UsageError& error) {
    train::suggest_own_names(root, error.what());
    throw;
  }
  config.options = record;
  for (auto& model : config.models) model.options = record;
  return config;
}

}  // namespace

Config load_config(const std::string& file, const std::vector<std::string>& overrides) {
  return config_of(load_yaml(file), file, overrides);
}

Config parse_config(const std::string& text, const std::vector<std::string>& overrides) {
  const std::string name = "config";
  return config_of(parse_yaml(text, name, true), name, overrides);
}

void train::require_datasets(const Config& config) {
  if (config.data.type.empty())
    throw UsageError(config.at("data") + "missing; expected a map: the training data");
}

void check_config_files(const Config& config) {
  const auto check = [&](const std::string& key, const std::string& path) {
    if (path.find_first_of("*?[") == std::string::npos && ::access(path.c_str(), R_OK) != 0)
      throw UsageError(config.at(key) + path + ": " + std::strerror(errno) +
                       "; expected a readable file");
  };
  for (const auto& [key, path] : config.data.plan.files) check(key, path);
  for (const ModelSections* own : config.trained()) {
    if (!own->model.init.empty()) check(own->prefix() + "model.init", own->model.init);
    if (!own->optimizer_init.path.empty())
      check(own->prefix() + "optimizer.init", own->optimizer_init.path);
  }
  if (!config.checkpoint.from.empty()) check("checkpoint.from", config.checkpoint.from);
}

void check_config_world(const Config& config, int world_size) {
  // Groups of one rank train by themselves; larger ones are refused when they are made.
  for (const ModelSections* own : config.trained()) {
    const std::string& type = own->parallel.type;
    if (world_size > 1 && !own->parallel.plan.distributed && !config.parallel.local_sgd)
      throw UsageError(
          own->at("parallel.type") + type + ", but the world has " + std::to_string(world_size) +
          " ranks, and each would train a model of its own; expected one rank, or one of " +
          wrappers_other_than(type));
  }
  const int64_t batch = config.train.global_batch;
  if (batch % world_size != 0 && config.data.uneven == "error")
    throw UsageError(config.at("train.global_batch") + std::to_string(batch) +
                     " sequences cannot be divided by " + std::to_string(world_size) +
                     " ranks; expected a multiple of " + std::to_string(world_size));
  if (config.train.accumulation > 1 &&
      (batch % world_size != 0 || batch / world_size % config.train.accumulation != 0)) {
    throw UsageError(
        config.at("train.accumulation") + std::to_string(config.train.accumulation) +
        " equal parts of the " + std::to_string(batch) + " samples of a step on " +
        std::to_string(world_size) +
        " ranks are not whole; expected a train.global_batch that ranks times parts divide");
  }
}

}  // namespace tessera
