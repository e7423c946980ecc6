#include "optim/text_of_options.h"

#include <typeinfo>

#include <c10/util/Type.h>

#include "optim/master_weights.h"

namespace tessera {

std::string text_of_options(const OptionMap& options) {
  std::string text;
  const auto add = [&](const std::string& name, const OptionValue& value) {
    text += (text.empty() ? "" : " ") + name + " " + to_string(value);
  };
  if (const auto lr = options.find("lr"); lr != options.end()) add("lr", lr->second);
  for (const auto& [name, value] : options)
    if (name != "lr") add(name, value);
  return text;
}

std::string text_of_class(const torch::optim::Optimizer& optimizer) {
  if (const auto* masters = dynamic_cast<const optim::MasterWeights*>(&optimizer))
    return "with_master_weights(" + text_of_class(masters->inner()) + ")";
  return c10::demangle(typeid(optimizer).name());
}

}  // namespace tessera
