#include <algorithm>
#include <iterator>

#include "optim/option_rules.h"
#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera {

namespace {

template <class Options>
Options to_options(const std::string& name, const OptionMap& values) {
  Options options(0.0);
  optim::visit_options(options, [&values](const char* field_name, auto& field) {
    if (const auto found = values.find(field_name); found != values.end()) {
      optim::from_option(found->second, field);
    }
  });
  optim::check_options("optimizer " + name, options);
  return options;
}

template <class Opt, class Options>
void add_class(OptimizerRegistry& registry, const std::string& name, const Options& defaults) {
  OptimizerEntry entry;
  entry.options = optim::known_options_of(defaults);
  entry.make_options = [name](const OptionMap& values) {
    return std::make_unique<Options>(to_options<Options>(name, values));
  };
  entry.make_factory = [name](const OptionMap& values) {
    return optimizer_factory<Opt>(to_options<Options>(name, values));
  };
  registry.add(name, std::move(entry));
}

}  // namespace

void OptimizerRegistry::add(const std::string& name, OptimizerEntry entry) {
  if (!entries_.emplace(name, std::move(entry)).second) {
    throw UsageError("OptimizerRegistry: the name \"" + name + "\" is taken");
  }
}

std::vector<std::string> OptimizerRegistry::names() const {
  std::vector<std::string> names;
  std::transform(entries_.begin(), entries_.end(), std::back_inserter(names),
                 [](const auto& e) { return e.first; });
  return names;
}

bool OptimizerRegistry::contains(const std::string& name) const {
  return entries_.count(name) != 0;
}

const OptimizerEntry& OptimizerRegistry::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    throw optim::unknown_name("OptimizerRegistry", "optimizer", name, names());
  }
  return found->second;
}

const std::vector<KnownOption>& OptimizerRegistry::known_options(const std::string& name) const {
  return entry(name).options;
}

OptionMap OptimizerRegistry::complete(const std::string& name, const OptionMap& options) const {
  const auto& known = entry(name).options;
  OptionMap complete;
  std::vector<std::string> known_names;
  for (const auto& option : known) {
    known_names.push_back(option.name);
    if (option.standard) {
      complete[option.name] = *option.standard;
    }
  }
  for (const auto& [option_name, value] : options) {
    const auto found = std::find_if(known.begin(), known.end(),
                                    [&key = option_name](const auto& o) { return o.name == key; });
    if (found == known.end()) {
      throw optim::unknown_name("optimizer " + name, "option", option_name, known_names);
    }
    complete[option_name] = optim::checked_value("optimizer " + name, *found, value);
  }
  return complete;
}

OptimizerFactory OptimizerRegistry::factory(const std::string& name,
                                            const OptionMap& options) const {
  return entry(name).make_factory(complete(name, options));
}

std::unique_ptr<torch::optim::OptimizerOptions> OptimizerRegistry::options_for(
    const std::string& name, const OptionMap& options) const {
  return entry(name).make_options(complete(name, options));
}

OptimizerRegistry default_optimizers() {
  OptimizerRegistry registry;
  add_class<FusedSGD>(registry, "SGD", torch::optim::SGDOptions(1e-3));
  add_class<FusedAdam>(registry, "Adam", torch::optim::AdamOptions());
  add_class<FusedAdamW>(registry, "AdamW", torch::optim::AdamWOptions());
  add_class<torch::optim::Adagrad>(registry, "Adagrad", torch::optim::AdagradOptions());
  add_class<torch::optim::RMSprop>(registry, "RMSprop", torch::optim::RMSpropOptions());
  add_class<torch::optim::LBFGS>(registry, "LBFGS", torch::optim::LBFGSOptions());
  add_class<torch::optim::SGD>(registry, "torch.SGD", torch::optim::SGDOptions(1e-3));
  add_class<torch::optim::Adam>(registry, "torch.Adam", torch::optim::AdamOptions());
  add_class<torch::optim::AdamW>(registry, "torch.AdamW", torch::optim::AdamWOptions());
  return registry;
}

}  // namespace tessera
