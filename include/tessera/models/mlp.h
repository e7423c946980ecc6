#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

// A multi-layer perceptron as a plain module: the model that simulation codes train most, for
// programs that have no C++ model of their own.

#pragma GCC visibility push(default)
namespace tessera {

class OptionReader;

struct MLPOptions {
  int64_t inputs = 0;                ///< values of a sample; must be set
  int64_t outputs = 0;               ///< values of a prediction; must be set
  std::vector<int64_t> hidden = {};  ///< widths of the hidden layers; empty: one linear layer
  std::string activation = "tanh";   ///< "tanh", "relu", "gelu", "silu" or "sigmoid"
  std::string dtype = "float32";     ///< "float32" or "float64", of the parameters

  void read(OptionReader& options);  ///< See option_reader.h.
  /// Throws UsageError naming the option, its value and the expected values. The module's
  /// constructor calls it.
  void validate() const;
};

/// Linear layers (`layers.0.weight`, `layers.0.bias`, `layers.2.weight`, …) with the activation
/// between them, initialised as torch::nn::Linear is, from the global random state.
class MLPImpl : public torch::nn::Module {
 public:
  using Options = MLPOptions;
  explicit MLPImpl(const MLPOptions& options);
  /// `x`: [*, inputs], floating-point; converted to `dtype`. Returns [*, outputs] in `dtype`.
  at::Tensor forward(const at::Tensor& x);

 private:
  at::ScalarType dtype_;
  torch::nn::Sequential layers_;
};
TORCH_MODULE(MLP);

}  // namespace tessera
#pragma GCC visibility pop
