#include <algorithm>
#include <iterator>

#include "optim/option_rules.h"
#include "optim/serialized.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {

namespace {

constexpr const char* kComponent = "set_options";

std::optional<OptionValue> to_option_value(const c10::IValue& value) {
  if (value.isBool()) {
    return value.toBool();
  }
  if (value.isInt()) {
    return value.toInt();
  }
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isString()) {
    return value.toStringRef();
  }
  if (value.isDoubleList()) {
    return value.toDoubleVector();
  }
  if (value.isTuple()) {
    std::vector<double> numbers;
    for (const auto& element : value.toTupleRef().elements()) {
      if (!element.isDouble()) {
        return std::nullopt;
      }
      numbers.push_back(element.toDouble());
    }
    return numbers;
  }
  return std::nullopt;
}

// `model` is the value that it replaces, and has the same kind.
c10::IValue to_ivalue(const OptionValue& value, const c10::IValue& model) {
  if (const auto* numbers = std::get_if<std::vector<double>>(&value);
      numbers != nullptr && model.isTuple()) {
    return c10::ivalue::Tuple::create(std::vector<c10::IValue>(numbers->begin(), numbers->end()));
  }
  return std::visit([](const auto& v) { return c10::IValue(v); }, value);
}

std::vector<std::string> keys_of(const OptionMap& values) {
  std::vector<std::string> keys;
  std::transform(values.begin(), values.end(), std::back_inserter(keys),
                 [](const auto& v) { return v.first; });
  return keys;
}

// What a field of a user-defined type takes is what it holds now.
OptionValue checked_like(const std::string& name, const OptionValue& value,
                         const OptionMap& present) {
  const auto found = present.find(name);
  if (found == present.end()) {
    throw optim::unknown_name(kComponent, "option", name, keys_of(present));
  }
  KnownOption option;
  option.name = name;
  option.type = static_cast<OptionType>(found->second.index());
  return optim::checked_value(kComponent, option, value);
}

void set_user_options(torch::optim::OptimizerOptions& options, const OptionMap& values) {
  const OptionMap present = get_options(options);
  OptionMap checked;
  for (const auto& [name, value] : values) {
    checked[name] = checked_like(name, value, present);
  }
  auto stored = optim::to_values(options);
  if (!stored) {
    if (const auto lr = checked.find("lr"); lr != checked.end()) {
      options.set_lr(std::get<double>(lr->second));
    }
    return;
  }
  for (const auto& [name, value] : checked) {
    (*stored)[name] = to_ivalue(value, stored->at(name));
  }
  optim::from_values(*stored, options);
}

}  // namespace

OptionMap get_options(const torch::optim::OptimizerOptions& options) {
  OptionMap values;
  const bool known = optim::with_options(options, [&values](const auto& typed) {
    optim::visit_options(typed, [&values](const char* name, const auto& field) {
      if (auto value = optim::to_option(field)) {
        values[name] = std::move(*value);
      }
    });
  });
  if (known) {
    return values;
  }
  if (const auto stored = optim::to_values(options)) {
    for (const auto& [name, ivalue] : *stored) {
      if (auto value = to_option_value(ivalue)) {
        values[name] = std::move(*value);
      }
    }
  }
  if (values.count("lr") == 0) {
    try {
      values["lr"] = options.get_lr();
    } catch (const c10::Error&) {  // a type that has no learning rate
    }
  }
  return values;
}

void set_options(torch::optim::OptimizerOptions& options, const OptionMap& values) {
  const bool known = optim::with_options(options, [&values](auto& typed) {
    auto changed = typed;
    std::vector<std::string> names;
    size_t taken = 0;
    optim::visit_options(changed, [&](const char* name, auto& field) {
      names.emplace_back(name);
      if (const auto found = values.find(name); found != values.end()) {
        const auto type = optim::option_type<std::remove_reference_t<decltype(field)>>();
        optim::from_option(
            optim::checked_value(kComponent, optim::known_option(name, type), found->second),
            field);
        ++taken;
      }
    });
    if (taken != values.size()) {
      const auto unknown = std::find_if(values.begin(), values.end(), [&names](const auto& v) {
        return std::find(names.begin(), names.end(), v.first) == names.end();
      });
      throw optim::unknown_name(kComponent, "option", unknown->first, names);
    }
    typed = changed;
  });
  if (!known) {
    set_user_options(options, values);
  }
}

void copy_options(const torch::optim::OptimizerOptions& from, torch::optim::OptimizerOptions& to) {
  if (typeid(from) != typeid(to)) {
    throw UsageError(std::string("copy_options: the options are of different types, ") +
                     typeid(from).name() + " and " + typeid(to).name());
  }
  const bool known = optim::with_options(to, [&from](auto& typed) {
    typed = static_cast<const std::remove_reference_t<decltype(typed)>&>(from);
  });
  if (known) {
    return;
  }
  const auto stored = optim::to_values(from);
  if (!stored) {
    throw UsageError(std::string("copy_options: ") + typeid(from).name() +
                     " does not implement serialize(OutputArchive&): copy the parameter group's "
                     "options instead");
  }
  optim::from_values(*stored, to);
}

void copy_options(const torch::optim::OptimizerParamGroup& from,
                  torch::optim::OptimizerParamGroup& to) {
  to.set_options(from.options().clone());
}

}  // namespace tessera
