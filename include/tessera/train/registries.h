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
#include "tessera/train/metric.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/run_hook.h"
#include "tessera/train/train_step.h"
#include "tessera/train/trained_model.h"
#include "tessera/wrap_policy.h"

// The registries of components that a config selects by name, one per kind. Each registry contains
// the library's components from the start. A program adds its own before it calls train_main():
//
//   int main(int argc, char** argv) {
//     tessera::registry::models().add<MyNet>("MyNet");
//     return tessera::train_main(argc, argv);
//   }

#pragma GCC visibility push(default)
namespace tessera {

/// The samples of a dataset: for training and, where they exist, for evaluation and test.
struct DataSplits {
  std::shared_ptr<const Dataset> train;
  std::shared_ptr<const Dataset> val = nullptr;
  std::shared_ptr<const Dataset> test = nullptr;
  /// The loss that a trivial model reaches on `val`; may be empty.
  std::function<std::optional<double>()> baseline = {};
  std::string baseline_name = {};  ///< name of that model, for messages
};

/// The parts of the rest of the config that a dataset may use.
struct DataContext {
  int64_t vocab_size = 0;          ///< of the model; 0: not a language model
  std::string vocab_size_at = {};  ///< place of vocab_size in the config, for messages
  int64_t max_length = 0;          ///< longest sequence that the model accepts; 0: any
  int64_t classes = 0;             ///< of the model; 0: not a classifier
  SampleOrder order = SampleOrder::shuffled;
  uint64_t seed = 0;
};

/// A dataset with its options.
struct DataPlan {
  /// (config key, path) of files that must exist; checked before the ranks start.
  std::vector<std::pair<std::string, std::string>> files = {};
  bool text = false;  ///< tokens are bytes of text
  std::function<DataSplits()> load = {};
};

/// A communication hook with its options. `state` and `load_state` save and restore the hook's
/// state in checkpoints; empty functions: the hook has no state.
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
  /// Adds a torch::nn::Module class; model_plan() lists the members that are used if they exist.
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
  /// Adds a Dataset class. It is constructed from `Data::Options` (a struct with
  /// `void read(OptionReader&)`) if it has one, else without arguments. `validation()`, if it
  /// exists, returns the evaluation samples.
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
    if constexpr (requires { result.val = data->validation(); }) result.val = data->validation();
    return result;
  }
};

/// Loss functions of (output, targets) or (output, batch) that return a tensor (one loss) or
/// Losses.
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
  template <class Function>
  requires std::is_invocable_v<Function, const at::Tensor&, const Batch&>
  void add(const std::string& name, Function loss, const std::string& doc = "") {
    add_plan(
        name,
        [loss](const at::Tensor& output, const Batch& batch) {
          return detail::as_losses(loss(output, batch));
        },
        doc);
  }
};

/// Train steps of several models: a TrainStep, or a function (StepModels&, const Batch&) that is
/// TrainStep::train.
class TrainSteps : public Registry<TrainStep> {
 public:
  using Registry::add;
  using Registry::Registry;
  template <class Function>
  requires std::is_invocable_r_v<Losses, Function, StepModels&, const Batch&>
  void add(const std::string& name, Function train, const std::string& doc = "") {
    add_plan(name, TrainStep{.train = std::move(train)}, doc);
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
Registry<Metric>& metrics();
TrainSteps& train_steps();
Registry<std::function<std::shared_ptr<RunHook>()>>& hooks();

}  // namespace registry
}  // namespace tessera
#pragma GCC visibility pop
