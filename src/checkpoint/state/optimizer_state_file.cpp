#include "tessera/optim/optimizer_state_file.h"

#include <nlohmann/json.hpp>

#include "checkpoint/io/value_json.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr const char* kKey = "tessera_optimizer_state";
constexpr int kVersion = 1;

std::string tensor_name(const std::string& parameter, const std::string& key) {
  return parameter + "/" + key;
}

json description_of(const OptimizerStateDict& dict) {
  json value = {{"version", kVersion}, {"groups", json::array()}, {"state", json::object()}};
  for (const auto& group : dict.groups) {
    json options = json::object();
    for (const auto& [name, option] : group.options) options[name] = store::json_of(option);
    value["groups"].push_back({{"parameters", group.parameters}, {"options", options}});
  }
  for (const auto& [parameter, state] : dict.state) {
    json tensors = json::array(), scalars = json::object();
    for (const auto& [key, tensor] : state.tensors) tensors.push_back(key);
    for (const auto& [key, scalar] : state.scalars) scalars[key] = store::json_of(scalar);
    value["state"][parameter] = {{"tensors", tensors}, {"scalars", scalars}};
  }
  return value;
}

OptimizerStateDict read_dict(const SafetensorsFile& file, const json& value) {
  if (const int version = value.at("version"); version != kVersion) {
    throw UsageError("its version is " + std::to_string(version) + "; this Tessera reads version " +
                     std::to_string(kVersion));
  }
  OptimizerStateDict dict;
  for (const auto& entry : value.at("groups")) {
    auto& group = dict.groups.emplace_back();
    group.parameters = entry.at("parameters").get<std::vector<std::string>>();
    for (const auto& item : entry.at("options").items())
      group.options[item.key()] = store::option_from_json(item.value());
  }
  for (const auto& item : value.at("state").items()) {
    auto& state = dict.state[item.key()];
    for (const std::string key : item.value().at("tensors"))
      state.tensors[key] = file.load(tensor_name(item.key(), key));
    for (const auto& scalar : item.value().at("scalars").items())
      state.scalars[scalar.key()] = store::scalar_from_json(scalar.value());
  }
  return dict;
}

}  // namespace

void save_optimizer_state(const OptimizerStateDict& dict, const std::string& path) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [parameter, state] : dict.state)
    for (const auto& [key, tensor] : state.tensors)
      tensors.emplace_back(tensor_name(parameter, key), tensor);
  std::string description;
  try {
    description = description_of(dict).dump();
  } catch (const json::exception&) {
    throw UsageError("save_optimizer_state: " + path +
                     ": a name of a parameter, an option or its state is not valid UTF-8");
  }
  save_safetensors(path, tensors, {{"format", "pt"}, {kKey, description}});
}

OptimizerStateDict load_optimizer_state(const std::string& path) {
  const SafetensorsFile file(path);
  const auto found = file.metadata().find(kKey);
  if (found == file.metadata().end()) {
    throw UsageError("load_optimizer_state: " + path +
                     ": has no optimizer state; expected a file of save_optimizer_state()");
  }
  try {
    return read_dict(file, json::parse(found->second));
  } catch (const json::exception& error) {
    throw UsageError("load_optimizer_state: " + path + ": metadata " + kKey +
                     " violates the format: " + error.what());
  } catch (const UsageError& error) {
    throw UsageError("load_optimizer_state: " + path + ": " + error.what());
  }
}

}  // namespace tessera
