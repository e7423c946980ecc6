
#include "optim/named_values.h"
#include "optim/torch_options.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {

namespace {

constexpr const char* kComponent = "set_options";

std::optional<OptionValue> to_option_value(const c10::IValue& value) {
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return value.toDouble();
  if (value.isString()) return value.toStringRef();
  if (value.isDoubleList()) return value.toDoubleVector();
  if (value.isTuple()) {
    std::vector<double> numbers;
    for (const auto& element : value.toTupleRef().elements()) {
      if (!element.isDouble()) return std::nullopt;
      numbers.push_back(element.toDouble());
    }
    return numbers;
  }
  return std::nullopt;
}

/// `value` as the kind of IValue that `model`, the value to be replaced, has.
c10::IValue to_ivalue(const OptionValue& value, const c10::IValue& model) {
  if (const auto* numbers = std::get_if<std::vector<double>>(&value);
      numbers != nullptr && model.isTuple())
    return c10::ivalue::Tuple::create(std::vector<c10::IValue>(numbers->begin(), numbers->end()));
  return std::visit([](const auto& v) { return c10::IValue(v); }, value);
}

/// `values` for the options of a user-defined type, converted to the types of the `present` values.
OptionMap checked_like(const OptionMap& present, const OptionMap& values) {
  OptionMap checked, converted;
  for (const auto& [name, value] : values) {
    const auto found = present.find(name);
    // A value of the same type is copied, because OptionReader refuses infinities.
    const bool same = found != present.end() && found->second.index() == value.index();
    (same ? checked : converted)[name] = value;
  }
  const ConfigNode node = options_node(converted, kComponent);
  OptionReader reader(&node, {}, kComponent);
  for (auto [name, value] : present) {
    std::visit([&, key = name](auto& typed) { reader.read(key, typed, ""); }, value);
    if (converted.count(name) > 0) checked[name] = value;
  }
  reader.finish();
  return checked;
}

void set_user_options(torch::optim::OptimizerOptions& options, const OptionMap& values) {
  const OptionMap checked = checked_like(get_options(options), values);
  auto stored = optim::to_values(options);
  if (!stored) {
    if (const auto lr = checked.find("lr"); lr != checked.end())
      options.set_lr(std::get<double>(lr->second));
    return;
  }
  for (const auto& [name, value] : checked) (*stored)[name] = to_ivalue(value, stored->at(name));
  optim::from_values(*stored, options);
}

}  // namespace

OptionMap get_options(const torch::optim::OptimizerOptions& options) {
  OptionMap values;
  const bool known = optim::with_options(options, [&values](const auto& typed) {
    optim::visit_options(typed, [&values](const char* name, const auto& field, const auto&...) {
      if (auto value = optim::to_option(field)) values[name] = std::move(*value);
    });
  });
  if (known) return values;
  if (const auto stored = optim::to_values(options)) {
    for (const auto& [name, ivalue] : *stored)
      if (auto value = to_option_value(ivalue)) values[name] = std::move(*value);
  }
  if (values.count("lr") == 0) {
    try {
      values["lr"] = options.get_lr();
    } catch (const c10::Error&) {  // the type has no learning rate
    }
  }
  return values;
}

void set_options(torch::optim::OptimizerOptions& options, const OptionMap& values) {
  const bool known = optim::with_options(options, [&values](auto& typed) {
    auto changed = typed;
    const ConfigNode node = options_node(values, kComponent);
    OptionReader reader(&node, {}, kComponent);
    optim::read_fields(reader, changed);
    reader.finish();
    typed = changed;
  });
  if (!known) set_user_options(options, values);
}

void copy_options(const torch::optim::OptimizerOptions& from, torch::optim::OptimizerOptions& to) {
  if (typeid(from) != typeid(to)) {
    throw UsageError(std::string("copy_options: the options are of different types, ") +
                     typeid(from).name() + " and " + typeid(to).name());
  }
  const bool known = optim::with_options(to, [&from](auto& typed) {
    typed = static_cast<const std::remove_reference_t<decltype(typed)>&>(from);
  });
  if (known) return;
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
