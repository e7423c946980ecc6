#pragma once

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "tessera/config/registry.h"
#include "tessera/data/dataset.h"
#include "tessera/data/sampler.h"
#include "tessera/optim.h"
#include "tessera/step/comm_hook.h"
#include "tessera/step/lr_scheduler.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/run_hook.h"
#include "tessera/train/trained_model.h"
#include "tessera/wrap_policy.h"

// The components that a config names, by kind. Each registry has the library's own from the start;
// a program adds its own before train_main():
//
//   int main(int argc, char** argv) {
//     tessera::registry::models().add<MyNet>("MyNet");
//     return tessera::train_main(argc, argv);
//   }

namespace tessera {

/// What a dataset gives: samples to train on, and for evaluation and test, when there are some.
struct DataSplits {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> val = nullptr;
  std::shared_ptr<const Dataset> test = nullptr;
  std::function<std::optional<double>()> baseline =
      {};  ///< of `val`'s loss: what a trivial model reaches
  std::string baseline_name = {};
};

/// What a dataset may know of the rest of the config.
struct DataContext {
  int64_t vocab_size = 0;          ///< of the model; 0: not a language model
  std::string vocab_size_at = {};  ///< where the config says it, to begin a message
  int64_t max_length = 0;          ///< of a sequence for it; 0: any
  int64_t classes = 0;             ///< of the model; 0: not a classifier
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;
};

/// Configured data.
struct DataPlan {
  std::vector<std::pair<std::string, std::string>> files =
      {};             ///< key, path: must exist, checked before ranks start
  bool text = false;  ///< tokens are bytes of text
  std::function<DataSplits()> load = {};
};

/// A communication hook, with the state that checkpoints keep (empty functions: none).
struct CommHookPlan {
  struct Instance {
    CommHook hook;
    std::function<std::map<std::string, at::Tensor>()> state = {};
    std::function<void(const std::map<std::string, at::Tensor>&)> load_state = {};
  };
  std::function<Instance()> make = {};
};

namespace registry {

class Models : public Registry<ModelPlan> {
 public:
  using Registry::add;
  using Registry::Registry;
  /// See model_plan() for what a class needs: nothing, beyond being a torch::nn::Module.
  template <class Net>
  void add(const std::string& name, const std::string& doc = "") {
    add(
        name, [](OptionReader& options) { return model_plan<Net>(options); }, doc);
  }
};

class Datasets : public Registry<DataPlan, const DataContext&> {
 public:
  using Registry::add;
  using Registry::Registry;
  /// A Dataset class, constructed from `Data::Options` (with `void read(OptionReader&)`), or
  /// without arguments. Its `validation()`, when it has one, gives the evaluation samples.
  template <class Data>
  void add(const std::string& name, const std::string& doc = "") {
    add(
        name,
        [](OptionReader& options, const DataContext&) {
          DataPlan plan;
          if constexpr (requires(typename Data::Options chosen) {
                          chosen.read(options);
                          Data(chosen);
                        }) {
            typename Data::Options chosen;
            chosen.read(options);
            plan.load = [chosen, place = options.at("type")] {
              return named(place, [&] { return splits(std::make_shared<Data>(chosen)); });
            };
          } else {
            plan.load = [place = options.at("type")] {
              return named(place, [] { return splits(std::make_shared<Data>()); });
            };
          }
          options.finish();
          return plan;
        },
        doc);
  }

 private:
  template <class Data>
  static DataSplits splits(std::shared_ptr<Data> data) {
    DataSplits result{data};
    if constexpr (requires { result.val = data->validation(); }) {
      result.val = data->validation();
    }
    return result;
  }
};

/// Where a loss comes from: tensors (one loss) or Losses, of (output, targets) or (output, batch).
class LossFunctions : public Registry<LossFunction> {
 public:
  using Registry::add;
  using Registry::Registry;
  template <class Function>
  requires std::is_invocable_v<Function, const at::Tensor&, const at::Tensor&>
  void add(const std::string& name, Function loss, const std::string& doc = "") {
    add_plan(
        name,
        [loss](const at::Tensor& output, const Batch& batch) {
          return detail::as_losses(loss(output, batch.targets));
        },
        doc);
  }
};

Models& models();
Datasets& datasets();
LossFunctions& losses();
Registry<Preprocessor>& preprocessors();
OptimizerRegistry& optimizers();
Registry<LrSchedule>& schedulers();
Registry<WrapperPlan>& parallel();
WrapPolicyRegistry& wrap_policies();
Registry<CommHookPlan>& comm_hooks();
Registry<std::function<std::shared_ptr<RunHook>()>>& hooks();

}  // namespace registry
}  // namespace tessera
