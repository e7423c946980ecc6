#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/config/option_reader.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

#pragma GCC visibility push(default)
namespace tessera {

namespace detail {
/// Gets the error of Registry::add() while this thread loads a shared object, because no exception
/// may leave its static initialisers; otherwise null.
std::string*& registration_error();
}  // namespace detail

/// Components of one kind by name. In a config, `type` selects the component and all other keys of
/// the map are its options. An entry reads its options (option_reader.h) and returns a `Plan`: the
/// component with its options, to be constructed later, when the ranks and the data exist. Entries
/// are added by explicit calls, because linkers drop static initialisers of unused object files. A
/// value: copies are independent. Not thread-safe.
template <class Plan, class... Context>
class Registry {
 public:
  using Read = std::function<Plan(OptionReader& options, Context... context)>;

  /// `kind`: "model"; used in messages.
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  /// Throws UsageError when the name is taken.
  void add(const std::string& name, Read read, std::string doc = "") {
    if (!name.empty() && entries_.emplace(name, Entry{std::move(read), std::move(doc)}).second)
      return;
    const std::string text =
        "registry: " + kind_ + " \"" + name + "\" " +
        (name.empty() ? "has no name" : "is registered already; expected another name");
    if (detail::registration_error() == nullptr) throw UsageError(text);
    *detail::registration_error() += text + '\n';
  }
  /// Adds a component without options.
  void add_plan(const std::string& name, Plan plan, std::string doc = "") {
    add(
        name,
        [plan = std::move(plan)](OptionReader& options, Context...) {
          options.finish();
          return plan;
        },
        std::move(doc));
  }

  /// In alphabetical order.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [name, entry] : entries_) result.push_back(name);
    return result;
  }
  bool contains(const std::string& name) const { return entries_.count(name) > 0; }
  const std::string& kind() const { return kind_; }
  const std::string& doc(const std::string& name) const { return entry(name).doc; }

  /// Reads the options of component `name` from `options`, whose `type` has been read already.
  /// Throws UsageError for an unknown name (with the nearest known one), for an unknown key (with
  /// the types that have it as an option, or the nearest known key) and for impossible values.
  Plan read(const std::string& name, OptionReader& options, Context... context) const {
    const Entry& chosen = entry(name);
    options.explain([&](const std::string& key) {
      std::string owners;
      for (const auto& [other, known_entry] : entries_) {
        const Entry& known = known_entry;  // Clang 14 captures no structured binding
        const auto infos =
            OptionReader::describe([&](OptionReader& reader) { known.read(reader, context...); });
        const bool has = std::any_of(infos.begin(), infos.end(), [&](const OptionInfo& info) {
          return info.path.front() == key;
        });
        if (has && other != name) owners += (owners.empty() ? "" : " and ") + other;
      }
      return owners.empty()
                 ? ""
                 : "an option of " + owners + ", and " + options.full("type") + " is " + name;
    });
    Plan plan = chosen.read(options, context...);
    options.finish();
    return plan;
  }

  /// Component `name` with options from a program rather than a config. Throws as read() does; the
  /// messages begin with the kind and the name: "optimizer Adam: lr: -1; expected a number >= 0".
  Plan make(const std::string& name, const OptionMap& options = {}, Context... context) const {
    const ConfigNode node = options_node(options, kind_ + " " + name);
    OptionReader reader(&node, {}, node.where);
    return read(name, reader, context...);
  }

  /// The options of component `name`, with their defaults.
  OptionRecord describe(const std::string& name, Context... context) const {
    return OptionReader::describe(
        [&](OptionReader& reader) { entry(name).read(reader, context...); });
  }

 private:
  struct Entry {
    Read read;
    std::string doc;
  };

  const Entry& entry(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end())
      throw UsageError("unknown " + kind_ + " \"" + name + "\"" + suggestion(name, names()));
    return found->second;
  }

  std::string kind_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tessera
#pragma GCC visibility pop
