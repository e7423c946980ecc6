#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/optim/option_map.h"
#include "tessera/train/config_node.h"

// How a component reads its options. One function says which there are, of what type and range,
// with which defaults and what they mean; from it follow the checks of a config, `--dump-config`
// and the reference page. Local.

namespace tessera {

/// Bounds of a number. The text in messages follows from them.
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool min_open = false;
  bool max_open = false;
};
constexpr Range kPositive{0, std::numeric_limits<double>::infinity(), true, false};
constexpr Range kNotNegative{0, std::numeric_limits<double>::infinity(), false, false};
constexpr Range kAtLeastOne{1, std::numeric_limits<double>::infinity(), false, false};
constexpr Range kProbability{0, 1, false, true};

/// What is known of one option after it was read.
struct OptionInfo {
  std::vector<std::string> path;  ///< {"model", "n_embd"}
  std::string expected;           ///< "a whole number >= 1"
  std::string doc;
  ConfigNode standard;  ///< the default
  ConfigNode value;     ///< what holds
  bool given = false;
  bool required = false;
};
using OptionRecord = std::vector<OptionInfo>;

/// "file.yaml:12: train.steps: " followed by `what`, thrown as UsageError.
[[noreturn]] void fail_at(const ConfigNode& node, const std::string& path, const std::string& what);

/// Runs `function` and adds `place` (OptionReader::at) to a UsageError of what a config names.
template <class Function>
auto named(const std::string& place, const Function& function) {
  try {
    return function();
  } catch (const UsageError& error) {
    throw UsageError(place + error.what());
  }
}

/// Thrown by OptionReader::finish() of a reader that only describes: what follows are checks of
/// values.
struct OptionsDescribed {};

/// Reads one map into typed values. `out` holds the default and is left alone when the key is
/// absent; a key that is there and wrong is a UsageError with file, line, full key, value and what
/// was expected. finish() reports the keys that nobody read before those that are missing: a
/// misspelt key is usually both. A component calls it after its last read, and checks what options
/// mean together afterwards.
class OptionReader {
 public:
  /// `node` may be null (the map is absent). `where` names the file for messages about missing
  /// keys. `record`: what is read is noted there.
  OptionReader(const ConfigNode* node, std::vector<std::string> path, std::string where,
               std::shared_ptr<OptionRecord> record = nullptr);

  /// Lists the options that `read` reads.
  static OptionRecord describe(const std::function<void(OptionReader&)>& read);

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
            const std::string& doc);  ///< one, or a list
  /// null takes the value away.
  void read(const std::string& key, std::optional<double>& out, const std::string& doc,
            Range range = {});
  void read(const std::string& key, std::optional<int64_t>& out, const std::string& doc,
            Range range = {});
  /// null gives the empty string.
  void read_path(const std::string& key, std::string& out, const std::string& doc);
  /// One path or a list of them; null gives none.
  void read_paths(const std::string& key, std::vector<std::string>& out, const std::string& doc);
  /// One of a few words.
  void read_choice(const std::string& key, std::string& out,
                   const std::vector<std::string>& choices, const std::string& doc);
  /// One of a few words, each with its value; several words may stand for one value, the first is
  /// its name.
  template <class Choice>
  void read_enum(const std::string& key, Choice& out,
                 const std::vector<std::pair<std::string, Choice>>& choices,
                 const std::string& doc) {
    std::vector<std::string> names;
    std::string chosen;
    for (const auto& [name, choice] : choices) {
      names.push_back(name);
      if (choice == out && chosen.empty()) {
        chosen = name;
      }
    }
    read_choice(key, chosen, names, doc);
    for (const auto& [name, choice] : choices) {
      if (name == chosen) {
        out = choice;
      }
    }
  }
  /// As `read_enum`; absent or null: nothing.
  template <class Choice>
  void read_optional_enum(const std::string& key, std::optional<Choice>& out,
                          const std::vector<std::pair<std::string, Choice>>& choices,
                          const std::string& doc) {
    std::vector<std::string> names;
    std::string chosen;
    for (const auto& [name, choice] : choices) {
      names.push_back(name);
    }
    read_optional_choice(key, chosen, names, doc);
    out.reset();
    for (const auto& [name, choice] : choices) {
      if (name == chosen) {
        out = choice;
      }
    }
  }

  /// Any option that is not read otherwise, as plain values.
  OptionMap rest();
  /// The value of a scalar or a list of numbers.
  static OptionValue value_of(const ConfigNode& node, const std::string& path);

  /// The node of a key whose value the caller reads himself; null pointer when absent.
  const ConfigNode* take(const std::string& key, const std::string& expected,
                         const std::string& doc, const ConfigNode& standard = {});
  /// A map inside this one; `given` tells whether it is there and not null.
  OptionReader map(const std::string& key);
  bool given(const std::string& key) const;  ///< there, and not null
  bool has(const std::string& key) const;
  const ConfigNode* node() const { return node_; }
  /// The maps of a list; empty when absent.
  std::vector<OptionReader> list(const std::string& key, const std::string& doc);

  /// Keys in the file that nobody has read so far.
  std::vector<std::string> unread() const;
  /// Refuses `key`, with the reason why it is not allowed here, though it makes sense elsewhere.
  void refuse(const std::string& key, const std::string& why);
  /// finish() will throw when `key` is absent; `what` says what belongs there.
  void require(const std::string& key, const std::string& what);
  /// What finish() says of an unknown key, where it knows more than the nearest name.
  void explain(std::function<std::string(const std::string& key)> explain) {
    explain_ = std::move(explain);
  }
  [[noreturn]] void fail(const std::string& key, const std::string& what) const;
  /// "file.yaml:12: data.path: ", the start of a message about a key, for errors that show later.
  std::string at(const std::string& key) const;
  void finish() const;

  bool describing() const { return describing_; }
  const std::string& where() const { return where_; }
  std::string full(const std::string& key) const;

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
  std::vector<std::string> path_;
  std::string where_;
  std::shared_ptr<OptionRecord> record_;
  bool describing_ = false;
  std::vector<std::string> known_;
  std::vector<std::string> missing_;
  std::function<std::string(const std::string&)> explain_;
};

}  // namespace tessera
