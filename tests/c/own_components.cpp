// A shared object that adds models, for tessera_load_components().
#include <torch/nn/modules/linear.h>

#include "tessera/train/registries.h"

namespace {

struct LineImpl : torch::nn::Module {
  LineImpl() : line(register_module("line", torch::nn::Linear(3, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return line(x); }
  torch::nn::Linear line;
};
TORCH_MODULE(Line);

struct RefusingImpl : torch::nn::Module {
  RefusingImpl() { throw tessera::UsageError("Refusing: no weights; expected another model"); }
  at::Tensor forward(const at::Tensor& x) { return x; }
};
TORCH_MODULE(Refusing);

const bool added = [] {
  tessera::registry::models().add<Refusing>("Refusing", "throws");
  tessera::registry::models().add<Line>("Line", "of a shared object");
  return true;
}();

}  // namespace
