#include <algorithm>
#include <filesystem>

#include "config/scalar_values.h"
#include "tessera/config/config_node.h"
#include "tessera/config/option_reader.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Kind = ConfigNode::Kind;
namespace fs = std::filesystem;

constexpr const char* kBase = "base";
constexpr const char* kDelete = "delete";

/// Removes a member from a map and returns it; Null when it is absent.
ConfigNode take_member(ConfigNode& map, const std::string& key) {
  const auto found =
      std::find_if(map.members.begin(), map.members.end(),
                   [&](const ConfigNode::Member& member) { return member.key == key; });
  if (found == map.members.end()) return {};
  ConfigNode value = std::move(found->value);
  map.members.erase(found);
  return value;
}

/// Removes the key `delete` from a map and returns its value; false when it is absent.
bool remove_delete_key(ConfigNode& node) {
  const ConfigNode value = take_member(node, kDelete);
  if (value.kind == Kind::Null) return false;
  const auto flag = config::parse_bool(value);
  if (!flag) {
    fail_at(value, kDelete,
            value.describe() + "; expected true (removes the bases' values of this map) or false");
  }
  return *flag;
}

/// Removes all `delete` keys: values that replace or add a map may contain them.
void remove_delete_keys(ConfigNode& node) {
  if (node.kind == Kind::Map) remove_delete_key(node);
  for (auto& member : node.members) remove_delete_keys(member.value);
  for (auto& item : node.items) remove_delete_keys(item);
}

void merge(ConfigNode& under, ConfigNode over) {
  if (under.kind != Kind::Map || over.kind != Kind::Map || remove_delete_key(over)) {
    remove_delete_keys(over);
    under = std::move(over);
    return;
  }
  under.where = over.where;
  for (auto& member : over.members) {
    if (ConfigNode* known = under.find(member.key)) {
      merge(*known, std::move(member.value));
    } else {
      remove_delete_keys(member.value);
      under.members.push_back(std::move(member));
    }
  }
}

std::vector<std::string> base_files(const ConfigNode& base) {
  std::vector<std::string> files;
  const auto add = [&](const ConfigNode& item) {
    if (item.kind != Kind::Scalar || item.text.empty())
      fail_at(item, kBase, item.describe() + "; expected a YAML file or a list of them");
    files.push_back(item.text);
  };
  if (base.kind == Kind::Sequence) std::for_each(base.items.begin(), base.items.end(), add);
  else if (base.kind != Kind::Null) add(base);
  return files;
}

/// Reads a file and its bases. `chain`: the files whose bases include this one.
ConfigNode load(const std::string& path, std::vector<std::string> chain, int& files) {
  ConfigNode own = parse_yaml_file(path);
  if (++files > kMaxConfigFiles)
    throw UsageError(path + ": more than " + std::to_string(kMaxConfigFiles) + " files by base");
  chain.push_back(fs::weakly_canonical(path).string());
  const ConfigNode base = take_member(own, kBase);
  ConfigNode merged;
  merged.kind = Kind::Map;
  merged.where = path;
  for (const auto& file : base_files(base)) {
    const fs::path inner = fs::path(path).parent_path() / file;
    if (std::find(chain.begin(), chain.end(), fs::weakly_canonical(inner).string()) !=
        chain.end()) {
      fail_at(base, kBase,
              file +
                  "; the files include each other as base; expected files that do not include this "
                  "one");
    }
    try {
      merge(merged, load(inner.lexically_normal().string(), chain, files));
    } catch (const UsageError& error) {
      if (fs::exists(inner)) throw;
      fail_at(base, kBase, error.what());
    }
  }
  merge(merged, std::move(own));
  if (merged.node_count() > kMaxConfigNodes) {
    throw UsageError(path + ": more than " + std::to_string(kMaxConfigNodes) +
                     " values with its bases");
  }
  return merged;
}

}  // namespace

ConfigNode load_yaml(const std::string& path) {
  int files = 0;
  return load(path, {}, files);
}

}  // namespace tessera
