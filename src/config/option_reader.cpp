#include "tessera/config/option_reader.h"

#include <algorithm>

#include "config/scalar_values.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Kind = ConfigNode::Kind;

/// `{type: name}`.
ConfigNode map_of_type(const ConfigNode& name) {
  ConfigNode map;
  map.kind = Kind::Map;
  map.where = name.where;
  map.members.push_back({"type", name});
  return map;
}

}  // namespace

void fail_at(const ConfigNode& node, const std::string& path, const std::string& what) {
  throw UsageError(node.where + ": " + path + ": " + what);
}

OptionReader::OptionReader(const ConfigNode* node, std::vector<std::string> path, std::string where,
                           std::shared_ptr<OptionRecord> record)
    : node_(node), path_(std::move(path)), where_(std::move(where)), record_(std::move(record)) {
  if (node_ == nullptr || node_->kind == Kind::Null) {
    node_ = nullptr;
    return;
  }
  if (node_->kind != Kind::Map)
    fail_at(*node_, config::joined(path_, "."), node_->describe() + "; expected a map of keys");
  if (!node_->where.empty()) where_ = node_->where;
}

OptionRecord OptionReader::describe(const std::function<void(OptionReader&)>& read) {
  const auto record = std::make_shared<OptionRecord>();
  OptionReader reader(nullptr, {}, "", record);
  reader.describing_ = true;
  try {
    read(reader);
  } catch (const OptionsDescribed&) {
  }
  return *record;
}

OptionReader OptionReader::checking(const std::string& component) {
  OptionReader reader(nullptr, {}, component);
  reader.checking_ = true;
  return reader;
}

std::string OptionReader::full(const std::string& key) const {
  return path_.empty() ? key : config::joined(path_, ".") + "." + key;
}

const ConfigNode* OptionReader::look(const std::string& key) {
  known_.push_back(key);
  return node_ == nullptr ? nullptr : node_->find(key);
}

bool OptionReader::has(const std::string& key) const {
  return node_ != nullptr && node_->find(key) != nullptr;
}

bool OptionReader::given(const std::string& key) const {
  return has(key) && node_->find(key)->kind != Kind::Null;
}

void OptionReader::note(const std::string& key, std::string expected, const std::string& doc,
                        ConfigNode standard, ConfigNode value) {
  if (record_ == nullptr) return;
  OptionInfo info;
  info.path = path_;
  info.path.push_back(key);
  info.expected = std::move(expected);
  info.doc = doc;
  info.standard = std::move(standard);
  info.value = std::move(value);
  info.given = has(key);
  for (const auto& missing : missing_) info.required |= missing.rfind(full(key) + ":", 0) == 0;
  record_->push_back(std::move(info));
}

const ConfigNode* OptionReader::take(const std::string& key, const std::string& expected,
                                     const std::string& doc, const ConfigNode& standard) {
  const ConfigNode* node = look(key);
  note(key, expected, doc, standard, node == nullptr ? standard : *node);
  return node;
}

OptionReader OptionReader::map(const std::string& key) {
  auto path = path_;
  path.push_back(key);
  OptionReader inner(look(key), std::move(path), where_, record_);
  inner.describing_ = describing_;
  return inner;
}

OptionReader OptionReader::map_or_type(const std::string& key) {
  const ConfigNode* named_by = given(key) ? node_->find(key) : nullptr;
  if (named_by == nullptr || named_by->kind != Kind::Scalar) return map(key);
  look(key);
  auto owned = std::make_shared<ConfigNode>(map_of_type(*named_by));
  auto path = path_;
  path.push_back(key);
  OptionReader inner(owned.get(), std::move(path), where_, record_);
  inner.owned_ = std::move(owned);
  return inner;
}

std::vector<OptionReader> OptionReader::list(const std::string& key, const std::string& doc,
                                             bool or_type) {
  ConfigNode empty;
  empty.kind = Kind::Sequence;
  const std::string expected = or_type ? "a list of maps or names" : "a list of maps";
  const ConfigNode* node = take(key, expected, doc, empty);
  std::vector<OptionReader> readers;
  if (node == nullptr || node->kind == Kind::Null) return readers;
  if (node->kind != Kind::Sequence)
    fail_at(*node, full(key), node->describe() + "; expected " + expected);
  for (size_t i = 0; i < node->items.size(); ++i) {
    auto path = path_;
    path.push_back(key);
    path.push_back(std::to_string(i));
    const bool name = or_type && node->items[i].kind == Kind::Scalar;
    auto owned = std::make_shared<ConfigNode>(name ? map_of_type(node->items[i]) : ConfigNode());
    readers.emplace_back(name ? owned.get() : &node->items[i], std::move(path), where_);
    if (name) readers.back().owned_ = std::move(owned);
  }
  return readers;
}

void OptionReader::accept_rest() {
  for (const auto& key : unread()) take(key, "a value", "");
}

std::vector<std::string> OptionReader::unread() const {
  std::vector<std::string> keys;
  if (node_ != nullptr) {
    for (const auto& member : node_->members)
      if (std::find(known_.begin(), known_.end(), member.key) == known_.end())
        keys.push_back(member.key);
  }
  return keys;
}

void OptionReader::refuse(const std::string& key, const std::string& why) {
  if (const ConfigNode* node = node_ == nullptr ? nullptr : node_->find(key))
    fail_at(*node, full(key), why);
}

void OptionReader::require(const std::string& key, const std::string& what) {
  if (!given(key)) missing_.push_back(full(key) + ": missing; expected " + what);
}

std::string OptionReader::at(const std::string& key) const {
  const ConfigNode* node = node_ == nullptr ? nullptr : node_->find(key);
  return (node == nullptr ? where_ : node->where) + ": " + full(key) + ": ";
}

void OptionReader::fail(const std::string& key, const std::string& what) const {
  throw UsageError(at(key) + what);
}

void OptionReader::finish() const {
  if (describing_) {
    // The description is complete when the outermost reader finishes.
    if (path_.empty()) throw OptionsDescribed{};
    return;
  }
  for (const auto& key : unread()) {
    const std::string known = explain_ ? explain_(key) : "";
    fail(key, known.empty() ? "unknown key" + suggestion(key, known_) : known);
  }
  if (!missing_.empty()) throw UsageError(where_ + ": " + missing_.front());
}

}  // namespace tessera
