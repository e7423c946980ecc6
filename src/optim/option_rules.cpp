#include "optim/option_rules.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "tessera/detail/nearest.h"

namespace tessera {

std::string to_string(const OptionValue& value) {
  const auto number = [](double x) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof(text), x).ptr;
    return std::string(text, end);
  };
  return std::visit(
      [&number](const auto& v) -> std::string {
        using V = std::remove_cvref_t<decltype(v)>;
        if constexpr (std::is_same_v<V, bool>) {
          return v ? "true" : "false";
        } else if constexpr (std::is_same_v<V, int64_t>) {
          return std::to_string(v);
        } else if constexpr (std::is_same_v<V, double>) {
          return number(v);
        } else if constexpr (std::is_same_v<V, std::string>) {
          return '"' + v + '"';
        } else {
          std::string text = "[";
          for (size_t i = 0; i < v.size(); ++i) {
            text += (i == 0 ? "" : ", ") + number(v[i]);
          }
          return text + "]";
        }
      },
      value);
}

namespace optim {

namespace {

const char* type_name(OptionType type) {
  switch (type) {
    case OptionType::Bool:
      return "true or false";
    case OptionType::Integer:
      return "an integer";
    case OptionType::Number:
      return "a number";
    case OptionType::Text:
      return "a text";
    case OptionType::Numbers:
      break;
  }
  return "a list of numbers";
}

bool has_type(OptionType type, const OptionValue& value) {
  return value.index() == static_cast<size_t>(type);
}

bool in_unit_interval(double x) { return x >= 0 && x < 1; }

double number(const OptionValue& value) { return std::get<double>(value); }

}  // namespace

KnownOption known_option(const std::string& name, OptionType type) {
  KnownOption option{name, type, std::nullopt, type_name(type), nullptr};
  if (type == OptionType::Numbers) {
    option.expected = "two numbers in [0, 1)";
    option.accepts = [](const OptionValue& value) {
      const auto& list = std::get<std::vector<double>>(value);
      return list.size() == 2 && in_unit_interval(list[0]) && in_unit_interval(list[1]);
    };
  } else if (type == OptionType::Text) {
    option.expected = "\"strong_wolfe\"";
    option.accepts = [](const OptionValue& value) {
      return std::get<std::string>(value) == "strong_wolfe";
    };
  } else if (type == OptionType::Integer) {
    option.expected = "an integer >= 1";
    option.accepts = [](const OptionValue& value) { return std::get<int64_t>(value) >= 1; };
  } else if (name == "dampening") {
    option.accepts = [](const OptionValue& value) { return std::isfinite(number(value)); };
  } else if (type == OptionType::Number) {
    option.expected = "a number >= 0";
    option.accepts = [](const OptionValue& value) {
      return std::isfinite(number(value)) && number(value) >= 0;
    };
  }
  return option;
}

OptionValue checked_value(const std::string& component, const KnownOption& option,
                          const OptionValue& value) {
  OptionValue converted = value;
  if (option.type == OptionType::Number && std::holds_alternative<int64_t>(value)) {
    converted = static_cast<double>(std::get<int64_t>(value));
  }
  if (!has_type(option.type, converted) || (option.accepts && !option.accepts(converted))) {
    throw UsageError(component + ": option " + option.name + " = " + to_string(value) +
                     ", expected " +
                     (option.expected.empty() ? type_name(option.type) : option.expected));
  }
  return converted;
}

UsageError unknown_name(const std::string& component, const std::string& what,
                        const std::string& name, const std::vector<std::string>& known) {
  std::string list;
  for (const auto& one : known) {
    list += (list.empty() ? "" : ", ") + one;
  }
  return UsageError(component + ": unknown " + what + " \"" + name + "\"" +
                    did_you_mean(name, known) + "; known: " + (list.empty() ? "none" : list));
}

}  // namespace optim

}  // namespace tessera
