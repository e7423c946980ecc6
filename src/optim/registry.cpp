#include "optim/torch_options.h"
#include "tessera/optim.h"
#include "tessera/optim/fused_optimizer.h"

namespace tessera {

namespace {

template <class Opt, class Options>
void add_torch_class(OptimizerRegistry& registry, const std::string& name, const Options& defaults,
                     const std::string& doc) {
  registry.add(
      name,
      [defaults](OptionReader& reader) {
        Options options = defaults;
        optim::read_fields(reader, options);
        reader.finish();
        optim::check_combination(reader, options);
        return configured_optimizer<Opt>(options);
      },
      doc);
}

}  // namespace

OptionMap OptimizerRegistry::complete(const std::string& name, const OptionMap& options) const {
  const ConfigNode node = options_node(options, kind() + " " + name);
  OptionReader reader(&node, {}, node.where);
  read(name, reader);
  return reader.values();
}

OptimizerFactory OptimizerRegistry::factory(const std::string& name,
                                            const OptionMap& options) const {
  return make(name, options).factory;
}

std::unique_ptr<torch::optim::OptimizerOptions> OptimizerRegistry::options_for(
    const std::string& name, const OptionMap& options) const {
  return make(name, options).make_options();
}

OptimizerRegistry default_optimizers() {
  using namespace torch::optim;
  OptimizerRegistry registry;
  add_torch_class<FusedSGD>(registry, "SGD", SGDOptions(1e-3), "fused SGD");
  add_torch_class<FusedAdam>(registry, "Adam", AdamOptions(), "fused Adam");
  add_torch_class<FusedAdamW>(registry, "AdamW", AdamWOptions(), "fused AdamW");
  add_torch_class<Adagrad>(registry, "Adagrad", AdagradOptions(), "libtorch's Adagrad");
  add_torch_class<RMSprop>(registry, "RMSprop", RMSpropOptions(), "libtorch's RMSprop");
  add_torch_class<LBFGS>(registry, "LBFGS", LBFGSOptions(),
                         "libtorch's LBFGS; not for `tessera train`");
  add_torch_class<SGD>(registry, "torch.SGD", SGDOptions(1e-3), "libtorch's SGD");
  add_torch_class<Adam>(registry, "torch.Adam", AdamOptions(), "libtorch's Adam");
  add_torch_class<AdamW>(registry, "torch.AdamW", AdamWOptions(), "libtorch's AdamW");
  return registry;
}

}  // namespace tessera
