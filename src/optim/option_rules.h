#pragma once

#include <string>
#include <vector>

#include "optim/fields.h"
#include "tessera/error.h"
#include "tessera/optim.h"

// What values the options of libtorch's optimizers may have, and conversion between their fields
// and OptionValue.

namespace tessera::optim {

template <class Field>
constexpr OptionType option_type() {
  using F = std::remove_const_t<Field>;
  if constexpr (std::is_same_v<F, bool>) {
    return OptionType::Bool;
  } else if constexpr (is_one_of<F, int64_t, c10::optional<int64_t>>) {
    return OptionType::Integer;
  } else if constexpr (std::is_same_v<F, double>) {
    return OptionType::Number;
  } else if constexpr (is_one_of<F, std::string, c10::optional<std::string>>) {
    return OptionType::Text;
  } else {
    static_assert(is_one_of<F, std::tuple<double, double>>);
    return OptionType::Numbers;
  }
}

template <class Field>
std::optional<OptionValue> to_option(const Field& field) {
  if constexpr (is_one_of<Field, c10::optional<int64_t>, c10::optional<std::string>>) {
    return field.has_value() ? std::optional<OptionValue>(*field) : std::nullopt;
  } else if constexpr (is_one_of<Field, std::tuple<double, double>>) {
    return OptionValue(std::vector<double>{std::get<0>(field), std::get<1>(field)});
  } else {
    return OptionValue(field);
  }
}

/// `value` has the field's type and passed its rule.
template <class Field>
void from_option(const OptionValue& value, Field& field) {
  if constexpr (is_one_of<Field, c10::optional<int64_t>>) {
    field = std::get<int64_t>(value);
  } else if constexpr (is_one_of<Field, c10::optional<std::string>>) {
    field = std::get<std::string>(value);
  } else if constexpr (is_one_of<Field, std::tuple<double, double>>) {
    const auto& pair = std::get<std::vector<double>>(value);
    field = {pair.at(0), pair.at(1)};
  } else {
    field = std::get<Field>(value);
  }
}

/// An option of libtorch's optimizers by its name, which means the same in all of them. Without a
/// default.
KnownOption known_option(const std::string& name, OptionType type);

/// `value` as the option's type, integers made numbers where those are expected. Throws UsageError,
/// beginning with `component`, when the type or the value is not what the option takes.
OptionValue checked_value(const std::string& component, const KnownOption& option,
                          const OptionValue& value);

template <class Options>
std::vector<KnownOption> known_options_of(const Options& defaults) {
  std::vector<KnownOption> known;
  visit_options(defaults, [&known](const char* name, const auto& field) {
    known.push_back(known_option(name, option_type<std::remove_cvref_t<decltype(field)>>()));
    known.back().standard = to_option(field);
  });
  return known;
}

/// Throws UsageError when any option of `options` is impossible, alone or beside the others.
template <class Options>
void check_options(const std::string& component, const Options& options) {
  for (const auto& option : known_options_of(options)) {
    if (option.standard) {
      checked_value(component, option, *option.standard);
    }
  }
  if constexpr (is_one_of<Options, torch::optim::SGDOptions>) {
    if (options.nesterov() && (options.momentum() <= 0 || options.dampening() != 0)) {
      throw UsageError(
          component +
          ": option nesterov = true needs momentum > 0 and dampening = 0, not momentum = " +
          to_string(OptionValue(options.momentum())) +
          ", dampening = " + to_string(OptionValue(options.dampening())));
    }
  }
}

/// An error about `name`, listing the known names and the nearest.
UsageError unknown_name(const std::string& component, const std::string& what,
                        const std::string& name, const std::vector<std::string>& known);

}  // namespace tessera::optim
