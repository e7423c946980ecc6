#pragma once

#include <cstdint>
#include <string>
#include <vector>

// A config before its values have types: a tree in which every node knows its place in the file.
// All functions are local; only those that read files or environment variables have side inputs.

#pragma GCC visibility push(default)
namespace tessera {

struct ConfigNode {
  enum class Kind { Null, Scalar, Sequence, Map };
  struct Member;

  Kind kind = Kind::Null;
  std::string text;     ///< of a scalar, without its quotes
  bool quoted = false;  ///< a quoted scalar is always a string
  std::string where;    ///< "file.yaml:12" or "command line"; of a map's member: place of its key
  std::vector<ConfigNode> items;  ///< of a sequence
  std::vector<Member> members;    ///< of a map, in file order

  static ConfigNode scalar(std::string text, bool quoted = false);

  const ConfigNode* find(const std::string& key) const;
  ConfigNode* find(const std::string& key);
  int64_t node_count() const;
  /// For messages: the value as written, shortened.
  std::string describe() const;
  bool operator==(const ConfigNode& other) const;  ///< ignores `where`
};

struct ConfigNode::Member {
  std::string key;
  ConfigNode value;
  bool operator==(const Member& other) const { return key == other.key && value == other.value; }
};

/// Limits of a config. A hostile or mistaken file is an error at once, never a hang or a crash.
constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int kMaxConfigDepth = 32;
constexpr int64_t kMaxConfigNodes = 10000;  ///< after aliases are expanded
constexpr int kMaxConfigFiles = 64;         ///< a config and all its bases

/// Parses one YAML document. `label` names it in messages; `with_lines` adds ":<line>" to the
/// label. Throws UsageError for malformed YAML, several documents, explicit tags, duplicate keys,
/// keys that are not scalars, and documents beyond the limits.
ConfigNode parse_yaml(const std::string& text, const std::string& label, bool with_lines);

/// The same for a file. A file larger than kMaxConfigBytes is refused without being read.
ConfigNode parse_yaml_file(const std::string& path);

/// Reads a file and the files that its key `base` names (one or a list, relative to the file
/// itself), and merges them. Later files override earlier ones: maps key by key, all other values
/// as a whole. `delete: true` in a map removes the bases' values of that map. Throws UsageError
/// also for bases that include each other.
ConfigNode load_yaml(const std::string& path);

/// Sets the value of "dotted.key=YAML value" in the tree, replacing the old one. Missing maps are
/// created; a number selects an item of a list (`hooks.0.every=5`).
void apply_override(ConfigNode& root, const std::string& assignment);

/// Replaces `${env:NAME}` and `${env:NAME:-default}` in scalars by the variable's value. The
/// environment affects a config in no other way. Throws UsageError with the place for a variable
/// that is not set and has no default.
void expand_environment(ConfigNode& root);

/// YAML that parse_yaml reads as the same tree.
std::string to_yaml(const ConfigNode& root);

}  // namespace tessera
#pragma GCC visibility pop
