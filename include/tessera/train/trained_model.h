#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/torch.h>

#include "tessera/config/option_reader.h"
#include "tessera/data/dataset.h"
#include "tessera/process_group.h"
#include "tessera/step/losses.h"

// A model as the runner sees it: a module, and how it is called. Any torch::nn::Module becomes one
// without a change.

namespace tessera {

/// What the runner trains. Every rank makes the same.
struct TrainedModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Losses(const Batch&)> loss =
      {};  ///< mmengine's mode "loss"; empty: config section `loss` says it
  std::function<at::Tensor(const Batch&)> predict =
      {};  ///< mode "predict"; empty: the module has no forward(Tensor)

  /// Reads weights from a safetensors file, in place of reading by parameter and buffer name.
  std::function<void(const std::string& path)> load_weights = {};
  /// For language models: `prompt` (int64 [T]) followed by `count` sampled tokens.
  std::function<at::Tensor(const at::Tensor& prompt, int64_t count, double temperature,
                           int64_t top_k, at::Generator)>
      generate = {};
  std::string config_json = {};  ///< Hugging Face's config.json of the model; empty: none
};

struct ModelContext {
  ProcessGroup group;  ///< of all ranks: for layers that communicate
  uint64_t seed = 0;   ///< of the initial weights; the global generator is seeded with it already
};

/// A configured model.
struct ModelPlan {
  int64_t vocab_size = 0;  ///< tokens it knows; 0: its inputs are no tokens
  int64_t max_length = 0;  ///< tokens of a sequence at most; 0: any
  int64_t classes = 0;     ///< of its predictions; 0: not a classifier
  bool communicates =
      false;  ///< its layers use ModelContext::group, which then is one of their own
  std::function<TrainedModel(const ModelContext&)> make = {};
  /// Options, with values, that change what weights of the same shapes mean: a run goes on with its
  /// checkpoint's.
  std::vector<std::pair<std::string, std::string>> meaning = {};
};

/// From a model's output: named losses and figures, as parse_losses wants them.
using LossFunction = std::function<Losses(const at::Tensor& output, const Batch& batch)>;

/// Changes a batch before the model gets it (normalisation, augmentation); mmengine's data
/// preprocessor. Called in the training loop's thread, on every rank.
using Preprocessor = std::function<Batch(Batch batch, bool training)>;

namespace detail {

template <class Net>
struct ModuleOf {
  using type = Net;
};
template <class Net>
requires requires { typename Net::ContainedType; }
struct ModuleOf<Net> {
  using type = typename Net::ContainedType;
};

inline Losses as_losses(const at::Tensor& loss) { return {{"loss", loss}}; }
inline Losses as_losses(Losses losses) { return losses; }

/// Whichever of a module's methods fit.
template <class Module>
TrainedModel trained_model(std::shared_ptr<Module> module) {
  TrainedModel model;
  Module* net = module.get();
  model.module = std::move(module);
  if constexpr (requires(const Batch& batch) { as_losses(net->loss(batch)); }) {
    model.loss = [net](const Batch& batch) { return as_losses(net->loss(batch)); };
  } else if constexpr (requires(const Batch& batch) {
                         as_losses(net->loss(batch.inputs, batch.targets));
                       }) {
    model.loss = [net](const Batch& batch) {
      return as_losses(net->loss(batch.inputs, batch.targets));
    };
  }
  if constexpr (requires(const Batch& batch) { at::Tensor(net->predict(batch)); }) {
    model.predict = [net](const Batch& batch) { return at::Tensor(net->predict(batch)); };
  } else if constexpr (requires(const Batch& batch) { at::Tensor(net->forward(batch)); }) {
    model.predict = [net](const Batch& batch) { return at::Tensor(net->forward(batch)); };
  } else if constexpr (requires(const Batch& batch) { at::Tensor(net->forward(batch.inputs)); }) {
    model.predict = [net](const Batch& batch) { return at::Tensor(net->forward(batch.inputs)); };
  }
  return model;
}

}  // namespace detail

/// A plan for `Net`, a torch::nn::Module class or a ModuleHolder of one: constructed from
/// `Net::Options`, when there is such a struct with `void read(OptionReader&)`, else without
/// arguments. Its loss is `loss(batch)` or `loss(inputs, targets)`, giving a tensor or Losses, when
/// it has one; its prediction `predict(batch)`, `forward(batch)` or `forward(inputs)`.
template <class Net>
ModelPlan model_plan(OptionReader& options) {
  using Module = typename detail::ModuleOf<Net>::type;
  static_assert(std::is_base_of_v<torch::nn::Module, Module>,
                "a torch::nn::Module or a ModuleHolder of one");
  ModelPlan plan;
  if constexpr (requires(typename Module::Options chosen) {
                  chosen.read(options);
                  Module(chosen);
                }) {
    typename Module::Options chosen;
    chosen.read(options);
    options.finish();
    plan.make = [chosen](const ModelContext&) {
      return detail::trained_model(std::make_shared<Module>(chosen));
    };
  } else {
    options.finish();
    plan.make = [](const ModelContext&) {
      return detail::trained_model(std::make_shared<Module>());
    };
  }
  return plan;
}

}  // namespace tessera
