#include "tessera/models/mlp.h"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

#include "tessera/config/option_reader.h"

namespace tessera {
namespace {

void add_activation(torch::nn::Sequential& layers, const std::string& name) {
  if (name == "tanh") layers->push_back(torch::nn::Tanh());
  else if (name == "relu") layers->push_back(torch::nn::ReLU());
  else if (name == "gelu") layers->push_back(torch::nn::GELU());
  else if (name == "silu") layers->push_back(torch::nn::SiLU());
  else layers->push_back(torch::nn::Sigmoid());
}

}  // namespace

void MLPOptions::read(OptionReader& options) {
  options.require("inputs", "the number of values of a sample");
  options.require("outputs", "the number of values of a prediction");
  options.read("inputs", inputs, "values of a sample", kAtLeastOne);
  options.read("outputs", outputs, "values of a prediction", kAtLeastOne);
  options.read("hidden", hidden, "widths of the hidden layers", kAtLeastOne);
  options.read_choice("activation", activation, {"tanh", "relu", "gelu", "silu", "sigmoid"},
                      "between the layers");
  options.read_choice("dtype", dtype, {"float32", "float64"},
                      "of the parameters; inputs are converted to it");
}

void MLPOptions::validate() const { check_options("MLP", *this); }

MLPImpl::MLPImpl(const MLPOptions& options)
    : dtype_(options.dtype == "float64" ? at::kDouble : at::kFloat) {
  options.validate();
  int64_t width = options.inputs;
  for (const int64_t next : options.hidden) {
    layers_->push_back(torch::nn::Linear(width, next));
    add_activation(layers_, options.activation);
    width = next;
  }
  layers_->push_back(torch::nn::Linear(width, options.outputs));
  register_module("layers", layers_);
  to(dtype_);
}

at::Tensor MLPImpl::forward(const at::Tensor& x) { return layers_->forward(x.to(dtype_)); }

}  // namespace tessera
