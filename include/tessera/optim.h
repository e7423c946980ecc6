#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "tessera/config/registry.h"
#include "tessera/optim/optimizer_state.h"

// Optimizers as values. A factory builds an optimizer for the parameters that a rank owns, which
// are known only after sharding. A registry makes factories from a name and a map of options. All
// functions are local.

#pragma GCC visibility push(default)
namespace tessera {

/// Builds an optimizer over parameter groups. A group without options takes the factory's defaults;
/// a group with options keeps exactly those. Each call returns an independent optimizer.
using OptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    std::vector<torch::optim::OptimizerParamGroup>)>;

/// A factory that constructs `Opt(groups, defaults)`, for any class with such a constructor:
/// torch::optim's, Tessera's or your own. `defaults` are copied at each call.
template <class Opt, class Options>
OptimizerFactory optimizer_factory(Options defaults) {
  return [defaults = std::move(defaults)](std::vector<torch::optim::OptimizerParamGroup> groups) {
    std::unique_ptr<torch::optim::Optimizer> optimizer = std::make_unique<Opt>(groups, defaults);
    for (size_t i = 0; i < groups.size(); ++i)
      if (groups[i].has_options()) copy_options(groups[i], optimizer->param_groups()[i]);
    return optimizer;
  };
}

/// An optimizer class with the values of its options: what an entry of OptimizerRegistry returns.
struct ConfiguredOptimizer {
  /// A new options object for one parameter group, at each call.
  std::function<std::unique_ptr<torch::optim::OptimizerOptions>()> make_options;
  OptimizerFactory factory;
};

/// `Opt` with `options`. `Opt` is constructed from (groups, options).
template <class Opt, class Options>
ConfiguredOptimizer configured_optimizer(const Options& options) {
  return {[options] { return std::make_unique<Options>(options); },
          optimizer_factory<Opt>(options)};
}

/// Optimizers by name; a Registry (see there for add(), names(), contains(), describe(), errors).
/// An entry reads its options with an OptionReader and returns a ConfiguredOptimizer.
class OptimizerRegistry : public Registry<ConfiguredOptimizer> {
 public:
  OptimizerRegistry() : Registry("optimizer") {}

  using Registry::add;
  /// `Opt`, constructed from (groups, options), with `Options`: default-constructible, derived from
  /// torch::optim::OptimizerOptions, with `void read(OptionReader&)`. Throws UsageError when the
  /// name is taken.
  template <class Opt, class Options>
  void add(const std::string& name, const std::string& doc = "") {
    add(
        name,
        [](OptionReader& reader) {
          Options options;
          options.read(reader);
          reader.finish();
          return configured_optimizer<Opt>(options);
        },
        doc);
  }

  /// The values of all options: those in `options`, checked and converted to the option's type, and
  /// the defaults of the others. An option without a default (LBFGS's max_eval) is absent unless
  /// given.
  OptionMap complete(const std::string& name, const OptionMap& options = {}) const;
  OptimizerFactory factory(const std::string& name, const OptionMap& options = {}) const;
  /// The options of one parameter group. Options that are absent from `options` take the registry's
  /// defaults, not those of a factory made earlier: merge the maps first.
  std::unique_ptr<torch::optim::OptimizerOptions> options_for(const std::string& name,
                                                              const OptionMap& options = {}) const;
};

/// SGD, Adam and AdamW (the fused classes of fused_optimizer.h), Adagrad, RMSprop and LBFGS
/// (libtorch's), and libtorch's own classes as torch.SGD, torch.Adam and torch.AdamW. The options
/// have libtorch's names and defaults; SGD's lr defaults to 1e-3.
OptimizerRegistry default_optimizers();

}  // namespace tessera
#pragma GCC visibility pop
