#pragma once

#include <optional>
#include <string>

#include <torch/optim/sgd.h>

#include "optim/torch_fields.h"
#include "tessera/config/option_reader.h"

// Reading, checking and converting the option structs of libtorch's optimizers.

namespace tessera::optim {

template <class Field>
std::optional<OptionValue> to_option(const Field& field) {
  if constexpr (is_one_of<Field, c10::optional<int64_t>, c10::optional<std::string>>)
    return field.has_value() ? std::optional<OptionValue>(*field) : std::nullopt;
  else if constexpr (is_one_of<Field, std::tuple<double, double>>)
    return OptionValue(std::vector<double>{std::get<0>(field), std::get<1>(field)});
  else return OptionValue(field);
}

template <class Field>
void read_field(OptionReader& reader, const char* name, Field& field, const char* doc,
                const Range& range) {
  if constexpr (std::is_same_v<Field, bool>) {
    reader.read(name, field, doc);
  } else if constexpr (std::is_same_v<Field, c10::optional<int64_t>>) {
    std::optional<int64_t> value;
    if (field.has_value()) value = *field;
    reader.read(name, value, doc, range);
    field = value ? Field(*value) : Field();
  } else if constexpr (std::is_same_v<Field, c10::optional<std::string>>) {
    std::string value = field.has_value() ? *field : "";
    reader.read_choice(name, value, {"strong_wolfe"}, doc);
    field = value.empty() ? Field() : Field(value);
  } else {
    reader.read(name, field, doc, range);
  }
}

/// Reads the fields of `options`, which hold the defaults.
template <class Options>
void read_fields(OptionReader& reader, Options& options) {
  visit_options(options, [&](const char* name, auto& field, const char* doc, const Range& range) {
    read_field(reader, name, field, doc, range);
  });
}

/// Throws UsageError for values that exclude each other.
template <class Options>
void check_combination(const OptionReader& reader, const Options& options) {
  if constexpr (is_one_of<Options, torch::optim::SGDOptions>) {
    if (options.nesterov() && (options.momentum() <= 0 || options.dampening() != 0)) {
      reader.fail("nesterov",
                  "true; expected false, or momentum > 0 and dampening = 0 (momentum is " +
                      to_string(OptionValue(options.momentum())) + ", dampening is " +
                      to_string(OptionValue(options.dampening())) + ")");
    }
  }
}

/// Throws UsageError, beginning with `component`, when a value is impossible by itself or with the
/// others.
template <class Options>
void check_options(const std::string& component, Options options) {
  OptionReader reader = OptionReader::checking(component);
  read_fields(reader, options);
  check_combination(reader, options);
}

}  // namespace tessera::optim
