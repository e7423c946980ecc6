// The `read` functions of OptionReader: the accepted values and the text form of each type.
#include <algorithm>

#include "config/scalar_values.h"
#include "tessera/config/option_reader.h"
#include "tessera/detail/nearest.h"

namespace tessera {
namespace {

using Kind = ConfigNode::Kind;
using config::joined;
using config::node_of;

/// Parses each item; no value when one is wrong. A scalar is a list of one item.
template <class Value, class Parse>
std::optional<std::vector<Value>> parse_list(const ConfigNode& node, const Parse& parse) {
  std::vector<Value> values;
  const bool sequence = node.kind == Kind::Sequence;
  for (size_t i = 0; i < (sequence ? node.items.size() : 1); ++i) {
    const auto value = parse(sequence ? node.items[i] : node);
    if (!value) return std::nullopt;
    values.push_back(*value);
  }
  return values;
}

/// Parses a value or null; no outer value when it is wrong.
template <class Value, class Parse>
std::optional<std::optional<Value>> parse_or_null(const ConfigNode& node, const Parse& parse) {
  if (node.kind == Kind::Null) return std::optional<Value>();
  const auto value = parse(node);
  return value ? std::optional<std::optional<Value>>(value) : std::nullopt;
}

std::optional<std::string> parse_text(const ConfigNode& node) {
  return node.kind == Kind::Scalar ? std::optional(node.text) : std::nullopt;
}

std::optional<std::string> parse_path(const ConfigNode& node) {
  return node.kind == Kind::Scalar && !node.text.empty() ? std::optional(node.text) : std::nullopt;
}

/// The first item of a list that `parse` refuses; `node` itself when it is no list.
template <class Parse>
const ConfigNode& wrong_part(const ConfigNode& node, const Parse& parse) {
  for (const auto& item : node.items)
    if (!parse(item)) return item;
  return node;
}

std::optional<OptionValue> option_value(const OptionValue& value) { return value; }
std::optional<OptionValue> option_value(const std::vector<int64_t>&) { return std::nullopt; }
template <class Value>
std::optional<OptionValue> option_value(const std::optional<Value>& value) {
  return value ? std::optional<OptionValue>(*value) : std::nullopt;
}

// Parsers of one value in a range, of lists of such values, and of a value or null.

auto integer_in(const Range& range) {
  return [range](const ConfigNode& node) {
    const auto value = config::parse_integer(node);
    return value && config::inside(static_cast<double>(*value), range) ? value : std::nullopt;
  };
}

auto number_in(const Range& range) {
  return [range](const ConfigNode& node) {
    const auto value = config::parse_number(node);
    return value && config::inside(*value, range) ? value : std::nullopt;
  };
}

template <class Value, class Parse>
auto list_of(Parse parse) {
  return [parse](const ConfigNode& node) { return parse_list<Value>(node, parse); };
}

template <class Value, class Parse>
auto or_null(Parse parse) {
  return [parse](const ConfigNode& node) { return parse_or_null<Value>(node, parse); };
}

constexpr auto kShow = [](const auto& value) { return node_of(value); };

}  // namespace

template <class Value, class Parse, class Show>
void OptionReader::read_value(const std::string& key, Value& out, const std::string& expected,
                              const std::string& doc, const Parse& parse, const Show& show) {
  const ConfigNode standard = show(out);
  const ConfigNode* given = look(key);
  if (const ConfigNode* node = given == nullptr && checking_ ? &standard : given) {
    const auto value = parse(*node);
    if (!value) {
      const ConfigNode& wrong = wrong_part(*node, parse);
      throw UsageError((wrong.where.empty() ? where_ : wrong.where) + ": " + full(key) + ": " +
                       wrong.describe() + "; expected " + expected);
    }
    out = *value;
  }
  if (auto value = option_value(out)) values_[key] = std::move(*value);
  note(key, expected, doc, standard, show(out));
}

void OptionReader::read(const std::string& key, int64_t& out, const std::string& doc, Range range) {
  read_value(key, out, config::expectation("a whole number", range), doc, integer_in(range), kShow);
}

void OptionReader::read(const std::string& key, int& out, const std::string& doc, Range range) {
  range.min = std::max(range.min, -2147483648.0);
  range.max = std::min(range.max, 2147483647.0);
  int64_t value = out;
  read(key, value, doc, range);
  out = static_cast<int>(value);
}

void OptionReader::read(const std::string& key, uint64_t& out, const std::string& doc) {
  auto value = static_cast<int64_t>(out);
  read(key, value, doc, kNotNegative);
  out = static_cast<uint64_t>(value);
}

void OptionReader::read(const std::string& key, double& out, const std::string& doc, Range range) {
  read_value(key, out, config::expectation("a number", range), doc, number_in(range), kShow);
}

void OptionReader::read(const std::string& key, bool& out, const std::string& doc) {
  read_value(key, out, "true or false", doc, config::parse_bool, kShow);
}

void OptionReader::read(const std::string& key, std::string& out, const std::string& doc) {
  read_value(key, out, "a string", doc, parse_text, kShow);
}

void OptionReader::read(const std::string& key, std::vector<int64_t>& out, const std::string& doc,
                        Range range) {
  read_value(key, out, "a list, each " + config::expectation("a whole number", range), doc,
             list_of<int64_t>(integer_in(range)), kShow);
}

void OptionReader::read(const std::string& key, std::vector<double>& out, const std::string& doc,
                        Range range) {
  read_value(key, out, "a list, each " + config::expectation("a number", range), doc,
             list_of<double>(number_in(range)), kShow);
}

void OptionReader::read(const std::string& key, std::vector<std::string>& out,
                        const std::string& doc) {
  read_value(key, out, "a string or a list of strings", doc, list_of<std::string>(parse_text),
             kShow);
}

void OptionReader::read(const std::string& key, std::tuple<double, double>& out,
                        const std::string& doc, Range range) {
  const std::string expected = config::expectation("two numbers", range);
  std::vector<double> pair{std::get<0>(out), std::get<1>(out)};
  read_value(key, pair, expected, doc, list_of<double>(number_in(range)), kShow);
  if (pair.size() != 2) fail(key, node_->find(key)->describe() + "; expected " + expected);
  out = {pair[0], pair[1]};
}

void OptionReader::read(const std::string& key, std::optional<double>& out, const std::string& doc,
                        Range range) {
  read_value(key, out, config::expectation("a number", range) + ", or null", doc,
             or_null<double>(number_in(range)), kShow);
}

void OptionReader::read(const std::string& key, std::optional<int64_t>& out, const std::string& doc,
                        Range range) {
  read_value(key, out, config::expectation("a whole number", range) + ", or null", doc,
             or_null<int64_t>(integer_in(range)), kShow);
}

void OptionReader::read_path(const std::string& key, std::string& out, const std::string& doc) {
  if (const ConfigNode* node = has(key) ? node_->find(key) : nullptr;
      node != nullptr && node->kind == Kind::Sequence)
    fail_at(*node, full(key), node->describe() + "; expected one path");
  read_value(
      key, out, "a path", doc,
      [](const ConfigNode& node) {
        return node.kind == Kind::Null ? std::optional<std::string>("") : parse_path(node);
      },
      [](const std::string& value) { return value.empty() ? ConfigNode{} : node_of(value); });
}

void OptionReader::read_paths(const std::string& key, std::vector<std::string>& out,
                              const std::string& doc) {
  using Paths = std::vector<std::string>;
  read_value(
      key, out, "a path or a list of paths", doc,
      [](const ConfigNode& node) -> std::optional<Paths> {
        return node.kind == Kind::Null ? Paths() : parse_list<std::string>(node, parse_path);
      },
      [](const Paths& value) { return value.empty() ? ConfigNode{} : node_of(value); });
}

void OptionReader::read_choice(const std::string& key, std::string& out,
                               const std::vector<std::string>& choices, const std::string& doc) {
  const std::string expected = "one of " + joined(choices, ", ");
  const ConfigNode standard = out.empty() ? ConfigNode{} : node_of(out);
  const ConfigNode* given = look(key);
  const ConfigNode* node = given == nullptr && checking_ ? &standard : given;
  if (node != nullptr && !(node->kind == Kind::Null && out.empty())) {
    const bool scalar = node->kind == Kind::Scalar;
    if (!scalar || std::find(choices.begin(), choices.end(), node->text) == choices.end())
      throw UsageError((node->where.empty() ? where_ : node->where) + ": " + full(key) + ": " +
                       node->describe() + "; expected " + expected +
                       (scalar ? did_you_mean(node->text, choices) : ""));
    out = node->text;
  }
  if (!out.empty()) values_[key] = out;
  note(key, expected, doc, standard, out.empty() ? ConfigNode{} : node_of(out));
}

void OptionReader::read_optional_choice(const std::string& key, std::string& out,
                                        const std::vector<std::string>& choices,
                                        const std::string& doc) {
  if (has(key) && !given(key)) {
    look(key);
    note(key, "one of " + joined(choices, ", ") + ", or null", doc, {}, {});
  } else {
    read_choice(key, out, choices, doc);
  }
}

OptionValue OptionReader::value_of(const ConfigNode& node, const std::string& path) {
  if (node.kind == Kind::Sequence) {
    const auto values = parse_list<double>(node, config::parse_number);
    if (!values) {
      for (const auto& item : node.items)
        if (!config::parse_number(item))
          fail_at(item, path, item.describe() + " in a list; expected numbers");
    }
    return *values;
  }
  if (node.kind != Kind::Scalar) {
    fail_at(node, path,
            node.describe() + "; expected a number, true or false, a word, or a list of numbers");
  }
  if (const auto flag = config::parse_bool(node)) return *flag;
  if (const auto whole = config::parse_integer(node)) return *whole;
  if (const auto number = config::parse_number(node)) return *number;
  return node.text;
}

}  // namespace tessera
