#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include <sys/stat.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include "tessera/config/config_node.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Builds the tree from the parser's events. YAML::Node is not used, because it drops quotes, keeps
/// the last of two equal keys, and builds the whole document before a limit can be checked.
class TreeBuilder : public YAML::EventHandler {
 public:
  TreeBuilder(std::string label, bool with_lines)
      : label_(std::move(label)), with_lines_(with_lines) {}

  ConfigNode take_root() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    if (expects_key()) fail(mark, "a key without a name");
    place(anchor, make(ConfigNode::Kind::Null, mark));
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    auto found = anchors_.find(anchor);
    if (found == anchors_.end()) fail(mark, "an alias inside the value that it names");
    count(mark, found->second.node_count());
    place(0, found->second);
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check_tag(mark, tag);
    if (value.find('\0') != std::string::npos)
      fail(mark, "a zero byte in \"" + value + "\"; expected text");
    if (expects_key()) {
      for (const auto& member : stack_.back().node.members)
        if (member.key == value)
          fail(mark, "duplicate key \"" + value + "\" (first at " + member.value.where + ")");
      stack_.back().key = value;
      stack_.back().key_where = where(mark);
      return;
    }
    ConfigNode node = make(ConfigNode::Kind::Scalar, mark);
    node.text = value;
    node.quoted = tag == "!";
    count(mark, 1);
    place(anchor, std::move(node));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigNode::Kind::Sequence);
  }
  void OnSequenceEnd() override { close(); }
  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value) override {
    open(mark, tag, anchor, ConfigNode::Kind::Map);
  }
  void OnMapEnd() override { close(); }

 private:
  struct Open {
    ConfigNode node;
    YAML::anchor_t anchor;
    std::optional<std::string> key;
    std::string key_where;
  };

  [[noreturn]] void fail(const YAML::Mark& mark, const std::string& what) const {
    throw UsageError(where(mark) + ": " + what);
  }

  std::string where(const YAML::Mark& mark) const {
    return with_lines_ ? label_ + ":" + std::to_string(mark.line + 1) : label_;
  }

  ConfigNode make(ConfigNode::Kind kind, const YAML::Mark& mark) const {
    ConfigNode node;
    node.kind = kind;
    node.where = where(mark);
    return node;
  }

  bool expects_key() const {
    return !stack_.empty() && stack_.back().node.kind == ConfigNode::Kind::Map &&
           !stack_.back().key;
  }

  void check_tag(const YAML::Mark& mark, const std::string& tag) const {
    if (!tag.empty() && tag != "?" && tag != "!")
      fail(mark, "tag \"" + tag + "\": tags are not used in a config");
  }

  void count(const YAML::Mark& mark, int64_t nodes) {
    nodes_ += nodes;
    if (nodes_ > kMaxConfigNodes)
      fail(mark, "more than " + std::to_string(kMaxConfigNodes) + " values (aliases expanded)");
  }

  void open(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
            ConfigNode::Kind kind) {
    check_tag(mark, tag);
    if (expects_key())
      fail(mark, "a list or a map as a key (or a bracket left open); expected a plain name");
    if (static_cast<int>(stack_.size()) >= kMaxConfigDepth)
      fail(mark, "nested deeper than " + std::to_string(kMaxConfigDepth) + " levels");
    count(mark, 1);
    stack_.push_back({make(kind, mark), anchor, std::nullopt, {}});
  }

  void close() {
    Open done = std::move(stack_.back());
    stack_.pop_back();
    place(done.anchor, std::move(done.node));
  }

  void place(YAML::anchor_t anchor, ConfigNode node) {
    if (anchor != 0) anchors_[anchor] = node;
    if (stack_.empty()) {
      root_ = std::move(node);
    } else if (Open& parent = stack_.back(); parent.node.kind == ConfigNode::Kind::Sequence) {
      parent.node.items.push_back(std::move(node));
    } else {
      node.where = parent.key_where;
      parent.node.members.push_back({std::move(*parent.key), std::move(node)});
      parent.key.reset();
    }
  }

  std::string label_;
  bool with_lines_;
  int64_t nodes_ = 0;
  std::vector<Open> stack_;
  std::map<YAML::anchor_t, ConfigNode> anchors_;
  ConfigNode root_;
};

}  // namespace

ConfigNode parse_yaml(const std::string& text, const std::string& label, bool with_lines) {
  if (static_cast<int64_t>(text.size()) > kMaxConfigBytes) {
    throw UsageError(label + ": " + std::to_string(text.size()) + " bytes; a config has at most " +
                     std::to_string(kMaxConfigBytes));
  }
  if (const size_t zero = text.find('\0'); zero != std::string::npos) {
    throw UsageError(label + ": a zero byte at offset " + std::to_string(zero) +
                     "; expected YAML text");
  }
  std::istringstream stream(text);
  TreeBuilder builder(label, with_lines);
  try {
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
    ConfigNode root = builder.take_root();
    TreeBuilder rest(label, with_lines);
    if (parser.HandleNextDocument(rest))
      throw UsageError(label + ": more than one YAML document; expected one");
    return root;
  } catch (const YAML::Exception& error) {
    const bool placed = with_lines && error.mark.line >= 0;
    throw UsageError(label + (placed ? ":" + std::to_string(error.mark.line + 1) : "") +
                     ": not YAML: " + error.msg);
  }
}

ConfigNode parse_yaml_file(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0)
    throw UsageError(path + ": " + std::strerror(errno) + "; expected a YAML config file");
  if (!S_ISREG(status.st_mode))
    throw UsageError(path + ": not a regular file; expected a YAML config file");
  if (status.st_size > kMaxConfigBytes) {
    throw UsageError(path + ": " + std::to_string(status.st_size) +
                     " bytes; a config has at most " + std::to_string(kMaxConfigBytes));
  }
  std::ifstream file(path, std::ios::binary);
  if (!file)
    throw UsageError(path + ": " + std::strerror(errno) + "; expected a readable YAML config file");
  std::string text(static_cast<size_t>(status.st_size), '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  ConfigNode root = parse_yaml(text, path, true);
  if (root.kind != ConfigNode::Kind::Map)
    throw UsageError(path + ": " + root.describe() + "; expected a map with keys and values");
  return root;
}

}  // namespace tessera
