#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/optim/optimizer_state.h"
#include "tessera/optim/option_map.h"

// Optimizers as values that can be handed on: a factory builds one for whichever parameters a rank
// turns out to own, and a registry finds factories by name with a map of options. All of it is
// local to one rank.

namespace tessera {

/// Builds an optimizer over parameter groups. A group without options takes the factory's defaults,
/// a group with options keeps exactly those. May be called several times, each call giving an
/// independent optimizer.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

/// Factory of `Opt(groups, defaults)`: any of torch::optim, ours, or a user's class with such a
/// constructor. `Options` is copied at each call.
template <class Opt, class Options>
OptimizerFactory optimizer_factory(Options defaults) {
  return [defaults = std::move(defaults)](std::vector<torch::optim::OptimizerParamGroup> groups) {
    std::unique_ptr<torch::optim::Optimizer> optimizer = std::make_unique<Opt>(groups, defaults);
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i].has_options()) {
        copy_options(groups[i], optimizer->param_groups()[i]);
      }
    }
    return optimizer;
  };
}

enum class OptionType { Bool, Integer, Number, Text, Numbers };

/// One option that an optimizer knows.
struct KnownOption {
  std::string name;
  OptionType type = OptionType::Number;
  /// The default; none where leaving the option out has a meaning of its own (LBFGS's max_eval).
  std::optional<OptionValue> standard;
  /// What a value must be, for the error, such as "a number >= 0"; and the test. No test: any value
  /// of the type.
  std::string expected;
  std::function<bool(const OptionValue&)> accepts;
};

/// What a registry knows of one name. Both functions receive every option that has a value, checked
/// and of its type.
struct OptimizerEntry {
  std::vector<KnownOption> options;
  /// For the options of one parameter group.
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>(const OptionMap&)> make_options;
  std::function<OptimizerFactory(const OptionMap&)> make_factory;
};

/// Optimizers by name. A value: copy it, add to it, pass it on.
///
/// Every look-up throws UsageError for an unknown name or option (listing the known ones and the
/// nearest), for a value of the wrong type and for an impossible value (naming optimizer, option,
/// value and what is expected).
class OptimizerRegistry {
 public:
  /// Throws UsageError when the name is taken.
  void add(const std::string& name, OptimizerEntry entry);

  /// In order of the alphabet.
  std::vector<std::string> names() const;
  bool contains(const std::string& name) const;
  const std::vector<KnownOption>& known_options(const std::string& name) const;

  /// `options` checked, integers turned into numbers where numbers are expected, defaults filled
  /// in.
  OptionMap complete(const std::string& name, const OptionMap& options) const;
  OptimizerFactory factory(const std::string& name, const OptionMap& options = {}) const;
  /// Options for one parameter group. What `options` lacks takes the registry's default, not that
  /// of a factory made earlier: merge the maps first.
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(const std::string& name,
                                                              const OptionMap& options = {}) const;

 private:
  const OptimizerEntry& entry(const std::string& name) const;

  std::map<std::string, OptimizerEntry> entries_;
};

/// SGD, Adam, AdamW (the fused classes of fused_optimizer.h), Adagrad, RMSprop, LBFGS (libtorch's),
/// and libtorch's own under torch.SGD, torch.Adam, torch.AdamW. Options have libtorch's names and
/// defaults; SGD's lr defaults to 1e-3.
OptimizerRegistry default_optimizers();

}  // namespace tessera
