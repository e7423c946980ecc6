#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/train/option_reader.h"

namespace tessera {

/// Components of one kind by name, for configurations: `type` is the key, everything else belongs
/// to the component. An entry reads its options (option_reader.h) and returns a `Plan`: what was
/// configured, to be made later, when ranks and data are there. Filled by explicit calls: no static
/// initialisers, which linkers drop. Not thread-safe.
template <class Plan, class... Context>
class Registry {
 public:
  using Read = std::function<Plan(OptionReader& options, Context... context)>;

  /// `kind`, for messages: "model".
  explicit Registry(std::string kind) : kind_(std::move(kind)) {}

  /// Throws UsageError when the name is taken.
  void add(const std::string& name, Read read, std::string doc = "") {
    if (name.empty() || !entries_.emplace(name, Entry{std::move(read), std::move(doc)}).second) {
      throw UsageError(
          "registry: " + kind_ + " \"" + name + "\" " +
          (name.empty() ? "has no name" : "is registered already; expected another name"));
    }
  }
  /// A component without options.
  void add_plan(const std::string& name, Plan plan, std::string doc = "") {
    add(
        name,
        [plan = std::move(plan)](OptionReader& options, Context...) {
          options.finish();
          return plan;
        },
        std::move(doc));
  }

  /// In order of the alphabet.
  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& [name, entry] : entries_) {
      result.push_back(name);
    }
    return result;
  }
  bool contains(const std::string& name) const { return entries_.count(name) > 0; }
  const std::string& kind() const { return kind_; }
  const std::string& doc(const std::string& name) const { return entry(name).doc; }

  /// The options of `name` from `options`, whose `type` has been read. Throws UsageError for an
  /// unknown name (with the nearest) and as the entry does; a key that belongs to another type is
  /// said to.
  Plan read(const std::string& name, OptionReader& options, Context... context) const {
    const Entry& chosen = entry(name);
    options.explain([&](const std::string& key) {
      std::string owners;
      for (const auto& [other, known] : entries_) {
        const auto infos =
            OptionReader::describe([&](OptionReader& reader) { known.read(reader, context...); });
        const bool has = std::any_of(infos.begin(), infos.end(), [&](const OptionInfo& info) {
          return info.path.front() == key;
        });
        if (has && other != name) {
          owners += (owners.empty() ? "" : " and ") + other;
        }
      }
      return owners.empty()
                 ? ""
                 : "an option of " + owners + ", and " + options.full("type") + " is " + name;
    });
    Plan plan = chosen.read(options, context...);
    options.finish();
    return plan;
  }

  /// What the entry reads.
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
    if (found == entries_.end()) {
      throw UsageError("registry: no " + kind_ + " \"" + name + "\"" + did_you_mean(name, names()));
    }
    return found->second;
  }

  std::string kind_;
  std::map<std::string, Entry> entries_;
};

}  // namespace tessera
