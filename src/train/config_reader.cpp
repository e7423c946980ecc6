#include "train/config_reader.h"

#include <algorithm>

#include "tessera/error.h"
#include "tessera/nearest.h"

namespace tessera::train {

void fail_at(const ConfigNode& node, const std::string& path, const std::string& what) {
  throw UsageError(node.where + ": " + path + ": " + what);
}

MapReader::MapReader(const ConfigNode* node, std::string path, std::string where)
    : node_(node), path_(std::move(path)), where_(std::move(where)) {
  if (node_ == nullptr || node_->kind == ConfigNode::Kind::Null) {
    node_ = nullptr;
    return;
  }
  if (node_->kind != ConfigNode::Kind::Map) {
    fail_at(*node_, path_, node_->describe() + "; expected a map of keys");
  }
  if (!node_->where.empty()) {
    where_ = node_->where;
  }
}

std::string MapReader::full(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

const ConfigNode* MapReader::take(const std::string& key) {
  known_.push_back(key);
  return node_ == nullptr ? nullptr : node_->find(key);
}

bool MapReader::has(const std::string& key) const { return node_ != nullptr && node_->find(key) != nullptr; }

void MapReader::fail(const std::string& key, const std::string& what) const {
  const ConfigNode* node = node_ == nullptr ? nullptr : node_->find(key);
  throw UsageError((node == nullptr ? where_ : node->where) + ": " + full(key) + ": " + what);
}

void MapReader::read(const std::string& key, int64_t& out, Range range) {
  if (const ConfigNode* node = take(key)) {
    const auto value = parse_integer(*node);
    if (!value || !inside(static_cast<double>(*value), range)) {
      fail_at(*node, full(key), node->describe() + "; expected " + expectation("a whole number", range));
    }
    out = *value;
  }
}

void MapReader::read(const std::string& key, uint64_t& out) {
  int64_t value = static_cast<int64_t>(out);
  read(key, value, kNotNegative);
  out = static_cast<uint64_t>(value);
}

void MapReader::read(const std::string& key, double& out, Range range) {
  if (const ConfigNode* node = take(key)) {
    const auto value = parse_number(*node);
    if (!value || !inside(*value, range)) {
      fail_at(*node, full(key), node->describe() + "; expected " + expectation("a number", range));
    }
    out = *value;
  }
}

void MapReader::read(const std::string& key, std::optional<double>& out, Range range) {
  const ConfigNode* node = node_ == nullptr ? nullptr : node_->find(key);
  if (node != nullptr && node->kind == ConfigNode::Kind::Null) {
    take(key);
    out.reset();
    return;
  }
  double value = out.value_or(0);
  read(key, value, range);
  if (node != nullptr) {
    out = value;
  }
}

void MapReader::read(const std::string& key, bool& out) {
  if (const ConfigNode* node = take(key)) {
    const auto value = parse_bool(*node);
    if (!value) {
      fail_at(*node, full(key), node->describe() + "; expected true or false");
    }
    out = *value;
  }
}

void MapReader::read(const std::string& key, std::string& out) {
  if (const ConfigNode* node = take(key)) {
    if (node->kind != ConfigNode::Kind::Scalar) {
      fail_at(*node, full(key), node->describe() + "; expected a string");
    }
    out = node->text;
  }
}

void MapReader::read_path(const std::string& key, std::string& out) {
  std::vector<std::string> paths;
  if (const ConfigNode* node = has(key) ? node_->find(key) : nullptr;
      node != nullptr && node->kind == ConfigNode::Kind::Sequence) {
    fail_at(*node, full(key), node->describe() + "; expected one path");
  }
  const bool given = has(key);
  read_paths(key, paths);
  if (given) {
    out = paths.empty() ? "" : paths.front();
  }
}

void MapReader::read_paths(const std::string& key, std::vector<std::string>& out) {
  const ConfigNode* node = take(key);
  if (node == nullptr) {
    return;
  }
  out.clear();
  if (node->kind == ConfigNode::Kind::Null) {
    return;
  }
  const auto add = [&](const ConfigNode& item) {
    if (item.kind != ConfigNode::Kind::Scalar || item.text.empty()) {
      fail_at(item, full(key), item.describe() + "; expected a path");
    }
    out.push_back(item.text);
  };
  if (node->kind == ConfigNode::Kind::Sequence) {
    std::for_each(node->items.begin(), node->items.end(), add);
  } else {
    add(*node);
  }
}

void MapReader::read_choice(const std::string& key, std::string& out, const std::vector<std::string>& choices) {
  if (const ConfigNode* node = take(key)) {
    const bool scalar = node->kind == ConfigNode::Kind::Scalar;
    if (!scalar || std::find(choices.begin(), choices.end(), node->text) == choices.end()) {
      std::string known;
      for (const auto& choice : choices) {
        known += (known.empty() ? "" : ", ") + choice;
      }
      fail_at(*node, full(key),
              node->describe() + "; expected one of " + known + (scalar ? did_you_mean(node->text, choices) : ""));
    }
    out = node->text;
  }
}

MapReader MapReader::map(const std::string& key) {
  const ConfigNode* node = take(key);
  return MapReader(node, full(key), where_);
}

std::optional<MapReader> MapReader::optional_map(const std::string& key) {
  const ConfigNode* node = take(key);
  if (node == nullptr || node->kind == ConfigNode::Kind::Null) {
    return std::nullopt;
  }
  return MapReader(node, full(key), where_);
}

std::vector<std::string> MapReader::unread() const {
  std::vector<std::string> keys;
  if (node_ != nullptr) {
    for (const auto& member : node_->members) {
      if (std::find(known_.begin(), known_.end(), member.key) == known_.end()) {
        keys.push_back(member.key);
      }
    }
  }
  return keys;
}

void MapReader::refuse(const std::string& key, const std::string& why) {
  if (const ConfigNode* node = take(key)) {
    fail_at(*node, full(key), why);
  }
  known_.pop_back();
}

void MapReader::require(const std::string& key, const std::string& what) {
  if (!has(key)) {
    missing_.push_back(full(key) + ": missing; expected " + what);
  }
}

void MapReader::finish() const {
  for (const auto& key : unread()) {
    fail(key, "unknown key" + did_you_mean(key, known_));
  }
  if (!missing_.empty()) {
    throw UsageError(where_ + ": " + missing_.front());
  }
}

}  // namespace tessera::train
