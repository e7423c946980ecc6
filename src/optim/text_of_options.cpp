#include "optim/text_of_options.h"

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

}  // namespace tessera
