#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/config/config_node.h"
#include "tessera/config/option_map.h"
#include "tessera/error.h"

// The one way in which components describe their options. A component has one function that reads
// its options with an OptionReader; each `read` states the name, the type, the range, the default
// and the meaning of one option. The same function serves to read a config or an OptionMap, to
// check a struct of options that a program has filled in, to write `--dump-config` and to write the
// reference page. Local.

#pragma GCC visibility push(default)
namespace tessera {

/// Bounds of a number. The "expected …" texts of messages are derived from them.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_open = false;  ///< `min` itself is not allowed
  bool max_open = false;  ///< `max` itself is not allowed
};
constexpr Range kPositive{0, std::numeric_limits<double>::infinity(), true, false};
constexpr Range kNotNegative{0, std::numeric_limits<double>::infinity(), false, false};
constexpr Range kAtLeastOne{1, std::numeric_limits<double>::infinity(), false, false};
constexpr Range kProbability{0, 1, false, true};  ///< 0 <= value < 1

/// One option after it was read.
struct OptionInfo {
  std::vector<std::string> path;  ///< {"model", "n_embd"}
  std::string expected;           ///< "a whole number >= 1"
  std::string doc;                ///< the meaning
  ConfigNode standard;            ///< the default
  ConfigNode value;               ///< the value in effect: given or default
  bool given = false;
  bool required = false;
};
using OptionRecord = std::vector<OptionInfo>;

/// Throws UsageError "file.yaml:12: train.steps: <what>".
[[noreturn]] void fail_at(const ConfigNode& node, const std::string& path, const std::string& what);

/// Calls `function`. A UsageError that it throws gets `place` (from OptionReader::at) as its
/// beginning, so that it names the config's file, line and key.
template <class Function>
auto named(const std::string& place, const Function& function) {
  try {
    return function();
  } catch (const UsageError& error) {
    throw UsageError(place + error.what());
  }
}

/// Thrown by finish() of a reader that OptionReader::describe made: all options are listed then,
/// and later checks would need values.
struct OptionsDescribed {};

/// Reads one map of options into typed variables. Each `read` leaves `out`, which holds the
/// default, unchanged when the key is absent. A key with a wrong value is a UsageError with file,
/// line, full key, value and what was expected. A component calls finish() after its last read and
/// checks options against each other after that. finish() reports unknown keys first, then missing
/// ones: a misspelt key is usually both.
class OptionReader {
 public:
  /// `node`: the map; null when it is absent. `where`: the file or the component, for messages
  /// about missing keys. `record`: every option that is read is appended there; may be null.
  OptionReader(const ConfigNode* node, std::vector<std::string> path, std::string where,
               std::shared_ptr<OptionRecord> record = nullptr);

  /// Lists the options that `read` reads, with their defaults.
  static OptionRecord describe(const std::function<void(OptionReader&)>& read);
  /// A reader without a map that checks each `out` itself: check_options() below.
  static OptionReader checking(const std::string& component);

  void read(const std::string& key, int64_t& out, const std::string& doc, Range range = {});
  void read(const std::string& key, int& out, const std::string& doc, Range range = {});
  void read(const std::string& key, uint64_t& out, const std::string& doc);
  void read(const std::string& key, double& out, const std::string& doc, Range range = {});
  void read(const std::string& key, bool& out, const std::string& doc);
  void read(const std::string& key, std::string& out, const std::string& doc);
  void read(const std::string& key, std::vector<int64_t>& out, const std::string& doc,
            Range range = {});
  void read(const std::string& key, std::vector<double>& out, const std::string& doc,
            Range range = {});
  void read(const std::string& key, std::vector<std::string>& out,
            const std::string& doc);  ///< one string, or a list
  void read(const std::string& key, std::tuple<double, double>& out, const std::string& doc,
            Range range = {});
  /// null removes the value.
  void read(const std::string& key, std::optional<double>& out, const std::string& doc,
            Range range = {});
  void read(const std::string& key, std::optional<int64_t>& out, const std::string& doc,
            Range range = {});
  /// null gives the empty string.
  void read_path(const std::string& key, std::string& out, const std::string& doc);
  /// One path or a list of paths; null gives an empty list.
  void read_paths(const std::string& key, std::vector<std::string>& out, const std::string& doc);
  /// One of the words in `choices`.
  void read_choice(const std::string& key, std::string& out,
                   const std::vector<std::string>& choices, const std::string& doc);
  /// One of a few words, each with its value. Several words may have the same value; the first one
  /// is shown as its name.
  template <class Choice>
  void read_enum(const std::string& key, Choice& out,
                 const std::vector<std::pair<std::string, Choice>>& choices,
                 const std::string& doc) {
    std::vector<std::string> names;
    std::string chosen;
    for (const auto& [name, choice] : choices) {
      names.push_back(name);
      if (choice == out && chosen.empty()) chosen = name;
    }
    read_choice(key, chosen, names, doc);
    for (const auto& [name, choice] : choices)
      if (name == chosen) out = choice;
  }
  /// As read_enum; no value when the key is absent or null.
  template <class Choice>
  void read_optional_enum(const std::string& key, std::optional<Choice>& out,
                          const std::vector<std::pair<std::string, Choice>>& choices,
                          const std::string& doc) {
    std::vector<std::string> names;
    std::string chosen;
    for (const auto& [name, choice] : choices) names.push_back(name);
    read_optional_choice(key, chosen, names, doc);
    out.reset();
    for (const auto& [name, choice] : choices)
      if (name == chosen) out = choice;
  }

  /// The values that this reader's `read`s returned, defaults included, if an OptionValue can hold
  /// them. Options without a value are absent.
  const OptionMap& values() const { return values_; }
  /// Accepts every key that was not read, without a check.
  void accept_rest();
  /// A scalar as bool, integer, number or text; a list of numbers.
  static OptionValue value_of(const ConfigNode& node, const std::string& path);

  /// The node of a key whose value the caller interprets; null when absent.
  const ConfigNode* take(const std::string& key, const std::string& expected,
                         const std::string& doc, const ConfigNode& standard = {});
  /// A reader of the map at `key`; its node() is null when the map is absent or null.
  OptionReader map(const std::string& key);
  /// As map(); a scalar `name` stands for `{type: name}`.
  OptionReader map_or_type(const std::string& key);
  bool given(const std::string& key) const;  ///< present and not null
  bool has(const std::string& key) const;    ///< present
  const ConfigNode* node() const { return node_; }
  /// Readers of the maps in a list; empty when absent. `or_type`: a scalar `name` in it stands for
  /// `{type: name}`.
  std::vector<OptionReader> list(const std::string& key, const std::string& doc,
                                 bool or_type = false);

  /// Keys in the config that no `read` has asked for yet.
  std::vector<std::string> unread() const;
  /// Throws when `key` is present; `why` says why it is not allowed here.
  void refuse(const std::string& key, const std::string& why);
  /// finish() will throw when `key` is absent; `what` says what belongs there.
  void require(const std::string& key, const std::string& what);
  /// Sets a function that returns the reason why a key is unknown; "" selects the default text.
  void explain(std::function<std::string(const std::string& key)> explain) {
    explain_ = std::move(explain);
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;
  /// "file.yaml:12: data.path: ", the beginning of a message about a key, for errors that are found
  /// later.
  std::string at(const std::string& key) const;
  void finish() const;

  bool describing() const { return describing_; }
  const std::string& where() const { return where_; }
  std::string full(const std::string& key) const;  ///< "model.n_embd"

 private:
  const ConfigNode* look(const std::string& key);
  void read_optional_choice(const std::string& key, std::string& out,
                            const std::vector<std::string>& choices, const std::string& doc);
  void note(const std::string& key, std::string expected, const std::string& doc,
            ConfigNode standard, ConfigNode value);
  template <class Value, class Parse, class Show>
  void read_value(const std::string& key, Value& out, const std::string& expected,
                  const std::string& doc, const Parse& parse, const Show& show);

  const ConfigNode* node_;
  std::shared_ptr<const ConfigNode> owned_;  // node_, when this reader made it
  std::vector<std::string> path_;
  std::string where_;
  std::shared_ptr<OptionRecord> record_;
  OptionMap values_;
  bool describing_ = false;
  bool checking_ = false;
  std::vector<std::string> known_;
  std::vector<std::string> missing_;
  std::function<std::string(const std::string&)> explain_;
};

/// `options` as the map that an OptionReader reads. `where`: the component, for messages.
ConfigNode options_node(const OptionMap& options, const std::string& where);

/// Checks the values of a struct with `void read(OptionReader&)` that a program has filled in.
/// Throws UsageError "<component>: <option>: <value>; expected <text>".
template <class Options>
void check_options(const std::string& component, Options options) {
  OptionReader reader = OptionReader::checking(component);
  options.read(reader);
}

/// The same for a single value.
template <class Value>
void check_option(const std::string& component, const std::string& name, Value value, Range range) {
  OptionReader::checking(component).read(name, value, "", range);
}

}  // namespace tessera
#pragma GCC visibility pop
