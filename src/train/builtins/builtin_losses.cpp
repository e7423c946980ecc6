#include <torch/nn/functional.h>

#include "tessera/step/power_sgd.h"
#include "train/builtins/builtin_components.h"

namespace tessera::train {
namespace {

namespace F = torch::nn::functional;

Losses cross_entropy(const at::Tensor& output, const Batch& batch) {
  // Classes are the last dimension of sequences of predictions and the second of other predictions.
  const bool sequence = output.dim() == 3 && batch.targets.dim() == 2;
  const at::Tensor logits = sequence ? output.flatten(0, 1) : output;
  const at::Tensor targets = sequence ? batch.targets.flatten() : batch.targets;
  const at::Tensor loss = F::cross_entropy(logits, targets);
  const at::Tensor right = logits.detach().argmax(1).eq(targets).to(at::kFloat).mean();
  return {{"loss", loss}, {"accuracy", right}};
}

LossFunction read_cross_entropy(OptionReader& options) {
  options.finish();
  return cross_entropy;
}

template <class Function>
void add_plain(registry::LossFunctions& losses, const std::string& name, Function function,
               const std::string& doc) {
  losses.add(
      name,
      [function](const at::Tensor& output, const at::Tensor& targets) -> at::Tensor {
        // libtorch's losses broadcast, with a warning. The caller adds the shapes.
        TORCH_CHECK(output.sizes() == targets.sizes(), "expected equal shapes");
        return function(output, targets.to(output.scalar_type()));
      },
      doc);
}

std::vector<double> channel_values(OptionReader& options, const std::string& key, double standard,
                                   const std::string& doc) {
  std::vector<double> values{standard};
  options.read(key, values, doc + ": one value for all channels, or one per channel");
  return values;
}

/// (inputs − mean) / std, by channel.
Preprocessor read_normalize(OptionReader& options) {
  const auto mean = channel_values(options, "mean", 0, "subtracted from the inputs");
  const auto std = channel_values(options, "std", 1, "divisor after that");
  options.finish();
  for (const double value : std)
    if (!(value > 0)) options.fail("std", std::to_string(value) + "; expected numbers > 0");
  return [mean, std](Batch batch, bool) {
    const auto shaped = [&](const std::vector<double>& values) {
      std::vector<int64_t> shape(static_cast<size_t>(std::max<int64_t>(batch.inputs.dim(), 2)), 1);
      shape[1] = static_cast<int64_t>(values.size());
      return at::tensor(values, batch.inputs.options().requires_grad(false)).reshape(shape);
    };
    batch.inputs = (batch.inputs - shaped(mean)) / shaped(std);
    return batch;
  };
}

CommHookPlan read_power_sgd(OptionReader& options) {
  PowerSgdOptions power;
  power.read(options);
  options.finish();
  return {[power] {
    const PowerSgd sgd(power);
    return CommHookPlan::Instance{sgd.hook(), [sgd] { return sgd.state_dict(); },
                                  [sgd](const std::map<std::string, at::Tensor>& state) {
                                    PowerSgd(sgd).load_state_dict(state);
                                  }};
  }};
}

}  // namespace

void add_losses(registry::LossFunctions& losses) {
  losses.add("cross_entropy", read_cross_entropy, "cross entropy of classes; reports the accuracy");
  add_plain(
      losses, "mse",
      [](const at::Tensor& output, const at::Tensor& targets) {
        return F::mse_loss(output, targets);
      },
      "mean squared error");
  add_plain(
      losses, "l1",
      [](const at::Tensor& output, const at::Tensor& targets) {
        return F::l1_loss(output, targets);
      },
      "mean absolute error");
  add_plain(
      losses, "smooth_l1",
      [](const at::Tensor& output, const at::Tensor& targets) {
        return F::smooth_l1_loss(output, targets);
      },
      "smooth L1 (Huber) loss with beta 1");
  add_plain(
      losses, "bce_with_logits",
      [](const at::Tensor& output, const at::Tensor& targets) {
        return F::binary_cross_entropy_with_logits(output, targets);
      },
      "binary cross entropy");
}

void add_preprocessors(Registry<Preprocessor>& preprocessors) {
  preprocessors.add_plan("none", nullptr, "batches are not changed");
  preprocessors.add("normalize", read_normalize, "(inputs - mean) / std, by channel");
}

void add_comm_hooks(Registry<CommHookPlan>& hooks) {
  hooks.add_plan("none", {[] { return CommHookPlan::Instance{}; }}, "exact mean");
  hooks.add_plan("fp16", {[] { return CommHookPlan::Instance{fp16_compress_hook()}; }},
                 "gradients are communicated as float16");
  hooks.add_plan("bf16", {[] { return CommHookPlan::Instance{bf16_compress_hook()}; }},
                 "gradients are communicated as bfloat16");
  hooks.add("power_sgd", read_power_sgd, "PowerSGD: low-rank gradients with error feedback");
}

}  // namespace tessera::train
