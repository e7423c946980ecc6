#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/config/option_reader.h"
#include "tessera/data/dataset.h"
#include "tessera/process_group.h"
#include "tessera/step/losses.h"
#include "tessera/weights/weights.h"

// A model as the trainer uses it: a module and the functions that call it. Any torch::nn::Module
// can be used without a change.

#pragma GCC visibility push(default)
namespace tessera {

/// The model that is trained. Every rank constructs the same one.
struct TrainedModel {
  std::shared_ptr<torch::nn::Module> module;
  /// mmengine's mode "loss". Empty: the config section `loss` selects the loss.
  std::function<Losses(const Batch&)> loss = {};
  /// mmengine's mode "predict". Empty: the module has no forward(Tensor).
  std::function<at::Tensor(const Batch&)> predict = {};
  /// The losses of a prediction, as `loss` computes them, so that an evaluation with metrics runs
  /// the model once. Set where the config section `loss` selects the loss.
  std::function<Losses(const at::Tensor& prediction, const Batch&)> loss_of_prediction = {};

  /// Maps parameters and buffers to tensors of model.init, as tessera::match_weights() does. Each
  /// rank then reads only its elements of these. Empty: tensors of the same names.
  std::function<WeightsMatch(const TensorSource& weights, bool strict)> match_weights = {};
  /// For language models. Returns `prompt` (int64 [T]) followed by `count` sampled tokens.
  std::function<at::Tensor(const at::Tensor& prompt, int64_t count, double temperature,
                           int64_t top_k, at::Generator)>
      generate = {};
  std::string config_json = {};  ///< Hugging Face's config.json of the model; empty: none
};

struct ModelContext {
  ProcessGroup group;  ///< all ranks, for layers that communicate
  uint64_t seed = 0;   ///< for the initial weights; the global generator is seeded with it already
};

/// A model with its options.
struct ModelPlan {
  int64_t vocab_size = 0;  ///< number of tokens it knows; 0: its inputs are not tokens
  int64_t max_length = 0;  ///< longest sequence in tokens; 0: any
  int64_t classes = 0;     ///< number of classes; 0: not a classifier
  /// Its layers use ModelContext::group, which is then a group of their own.
  bool communicates = false;
  std::function<TrainedModel(const ModelContext&)> make = {};
  /// Options, with values, that change the meaning of weights without changing their shapes. A
  /// resumed run must have the values of its checkpoint.
  std::vector<std::pair<std::string, std::string>> meaning = {};
};

/// Computes named losses and figures from a model's output, in the form that parse_losses() takes.
using LossFunction = std::function<Losses(const at::Tensor& output, const Batch& batch)>;

/// Changes a batch before the model gets it (normalisation, augmentation), as mmengine's data
/// preprocessor does. Called in the thread of the training loop, on every rank.
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

/// Uses the module's methods that have a suitable signature.
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
  if constexpr (requires(const Batch& batch) { at::Tensor(net->predict(batch)); })
    model.predict = [net](const Batch& batch) { return at::Tensor(net->predict(batch)); };
  else if constexpr (requires(const Batch& batch) { at::Tensor(net->forward(batch)); })
    model.predict = [net](const Batch& batch) { return at::Tensor(net->forward(batch)); };
  else if constexpr (requires(const Batch& batch) { at::Tensor(net->forward(batch.inputs)); })
    model.predict = [net](const Batch& batch) { return at::Tensor(net->forward(batch.inputs)); };
  return model;
}

}  // namespace detail

/// The plan for `Net`, a torch::nn::Module class or a ModuleHolder of one. The module is
/// constructed from `Net::Options` if that struct exists and has `void read(OptionReader&)`, else
/// without arguments. Its loss is `loss(batch)` or `loss(inputs, targets)`, if one of them exists;
/// it returns a tensor or Losses. Its prediction is the first of `predict(batch)`, `forward(batch)`
/// and `forward(inputs)` that exists.
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
#pragma GCC visibility pop
