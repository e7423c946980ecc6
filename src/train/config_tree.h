#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::train {

/// What a config file (or one `key=value`) says, before it is given types. Every node knows where it was written.
struct ConfigNode {
  enum class Kind { Null, Scalar, Sequence, Map };
  struct Member;

  Kind kind = Kind::Null;
  std::string text;               ///< of a scalar, without its quotes
  bool quoted = false;            ///< a quoted scalar is a string, whatever it looks like
  std::string where;              ///< "file.yaml:12" or "command line"; of a map's member: where its key stands
  std::vector<ConfigNode> items;  ///< of a sequence
  std::vector<Member> members;    ///< of a map, in file order

  const ConfigNode* find(const std::string& key) const;
  ConfigNode* find(const std::string& key);
  int64_t node_count() const;
  /// For messages: the value as written, shortened.
  std::string describe() const;
};

struct ConfigNode::Member {
  std::string key;
  ConfigNode value;
};

/// Limits on what is read, so that a hostile or mistaken file is an error at once and never a hang or a crash.
constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr int kMaxConfigDepth = 32;
constexpr int64_t kMaxConfigNodes = 10000;  ///< after aliases are expanded

/// One YAML document. `label` names it in messages; `with_lines` adds ":<line>" to it. Refused, as UsageError:
/// malformed YAML, several documents, explicit tags, duplicate keys, keys that are not scalars, and anything beyond the
/// limits.
ConfigNode parse_yaml(const std::string& text, const std::string& label, bool with_lines);

/// Reads at most kMaxConfigBytes: a larger file is refused by its size, unread.
ConfigNode parse_yaml_file(const std::string& path);

/// Applies "dotted.key=YAML value" to the tree, making maps on the way. The value replaces what was there.
void apply_override(ConfigNode& root, const std::string& assignment);

}  // namespace tessera::train
