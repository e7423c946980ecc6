#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What a config says, before it is given types: a tree whose every node knows where it was written.
// Local; pure but for reading files.

namespace tessera {

struct ConfigNode {
  enum class Kind { Null, Scalar, Sequence, Map };
  struct Member;

  Kind kind = Kind::Null;
  std::string text;     ///< of a scalar, without its quotes
  bool quoted = false;  ///< a quoted scalar is a string, whatever it looks like
  std::string where;  ///< "file.yaml:12" or "command line"; of a map's member: where its key stands
  std::vector<ConfigNode> items;  ///< of a sequence
  std::vector<Member> members;    ///< of a map, in file order

  static ConfigNode scalar(std::string text, bool quoted = false);

  const ConfigNode* find(const std::string& key) const;
  ConfigNode* find(const std::string& key);
  int64_t node_count() const;
  /// For messages: the value as written, shortened.
  std::string describe() const;
  bool operator==(const ConfigNode& other) const;  ///< places do not count
};

struct ConfigNode::Member {
  std::string key;
  ConfigNode value;
  bool operator==(const Member& other) const { return key == other.key && value == other.value; }
};

/// Limits on what is read, so that a hostile or mistaken file is an error at once and never a hang
/// or a crash.
constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int kMaxConfigDepth = 32;
constexpr int64_t kMaxConfigNodes = 10000;  ///< after aliases are expanded
constexpr int kMaxConfigFiles = 64;         ///< a config and all its bases

/// One YAML document. `label` names it in messages; `with_lines` adds ":<line>" to it. Refused, as
/// UsageError: malformed YAML, several documents, explicit tags, duplicate keys, keys that are not
/// scalars, and anything beyond the limits.
ConfigNode parse_yaml(const std::string& text, const std::string& label, bool with_lines);

/// Reads at most kMaxConfigBytes: a larger file is refused by its size, unread.
ConfigNode parse_yaml_file(const std::string& path);

/// A file with what its `base:` names (a file or a list, relative to the file itself), merged:
/// later wins, maps key by key, everything else as a whole. `delete: true` in a map drops what the
/// bases say there. UsageError also for bases that include each other.
ConfigNode load_yaml(const std::string& path);

/// Applies "dotted.key=YAML value" to the tree, making maps on the way; a number picks from a list
/// (`hooks.0.every=5`). The value replaces what was there.
void apply_override(ConfigNode& root, const std::string& assignment);

/// `${env:NAME}` and `${env:NAME:-default}` in scalars become the variable's value: the only way in
/// which the environment reaches a config. UsageError, with the place, for a variable that is not
/// set and has no default.
void expand_environment(ConfigNode& root);

/// YAML that parse_yaml reads as the same tree.
std::string to_yaml(const ConfigNode& root);

}  // namespace tessera
