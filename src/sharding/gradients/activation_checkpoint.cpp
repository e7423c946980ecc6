#include "tessera/activation_checkpoint.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/custom_class.h>

#include "sharding/gradients/backward_watch.h"
#include "tessera/detail/device_generator.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::detail {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// State of the random generators that the body may draw from: the CPU's generator and the
/// generators of the inputs' devices.
class RandomState {
 public:
  explicit RandomState(const std::vector<at::Tensor>& inputs) {
    remember(at::Device(at::kCPU));
    for (const auto& input : inputs)
      if (input.defined() && !input.is_cpu()) remember(input.device());
  }
  void restore() const {
    for (const auto& [device, state] : states_) {
      auto generator = device_generator(device);
      std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void remember(at::Device device) {
    auto generator = device_generator(device);
    std::lock_guard lock(generator.mutex());
    states_.emplace_back(device, generator.get_state());
  }
  std::vector<std::pair<at::Device, at::Tensor>> states_;
};

/// Everything that the second run needs besides the inputs.
struct Recipe : torch::CustomClassHolder {
  Recipe(CheckpointBody b, const std::vector<at::Tensor>& inputs)
      : body(std::move(b)), random(inputs) {}
  CheckpointBody body;
  std::vector<at::Tensor> outputs;  // of an earlier first run
  RandomState random;
  compat::AutocastState autocast = compat::AutocastState::current();
};

/// The inner backward adds to `.grad` of all parameters that the body uses, and its own operations
/// are not recorded.
void check_whole_backward() {
  if (at::GradMode::is_enabled())
    throw UsageError(
        "checkpoint: this backward has create_graph, and a checkpointed function can be "
        "differentiated only once; expected backward() without create_graph, or the function "
        "without checkpoint()");
  if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid())
    throw UsageError(
        "checkpoint: autograd::grad() or backward() with a list of inputs would also add to the "
        "gradients of the parameters that the checkpointed function uses; expected backward() "
        "without inputs, or the function without checkpoint()");
}

struct Checkpointed : torch::autograd::Function<Checkpointed> {
  /// `anchor` requires a gradient, so that the outputs require one even if no input does.
  static variable_list forward(AutogradContext* context, c10::intrusive_ptr<Recipe> recipe,
                               at::Tensor anchor, at::TensorList inputs) {
    context->saved_data["recipe"] = c10::IValue::make_capsule(recipe);
    context->save_for_backward(inputs.vec());
    if (!recipe->outputs.empty()) return std::exchange(recipe->outputs, {});
    return recipe->body(inputs.vec());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    check_whole_backward();
    const auto recipe =
        c10::static_intrusive_pointer_cast<Recipe>(context->saved_data["recipe"].toCapsule());
    const auto saved = context->get_saved_variables();
    std::vector<at::Tensor> inputs;
    for (const auto& tensor : saved)
      inputs.push_back(tensor.defined() ? tensor.detach().requires_grad_(tensor.requires_grad())
                                        : tensor);
    const sharding::BackwardWatch::ReentrantScope part_of_the_outer;
    std::vector<at::Tensor> outputs;
    {
      const RandomState now(saved);
      struct Back {
        const RandomState& random;
        ~Back() { random.restore(); }
      } back{now};
      recipe->random.restore();
      const compat::AutocastState::Scope autocast(recipe->autocast);
      const at::AutoGradMode record(true);
      outputs = recipe->body(inputs);
    }
    std::vector<at::Tensor> roots, root_gradients;
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].defined() || !outputs[i].requires_grad() || !gradients[i].defined()) continue;
      roots.push_back(outputs[i]);
      root_gradients.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    variable_list result{at::Tensor(), at::Tensor()};
    for (const auto& input : inputs)
      result.push_back(input.defined() ? input.grad() : at::Tensor());
    return result;
  }
};

}  // namespace

std::vector<at::Tensor> checkpoint(CheckpointBody body, std::vector<at::Tensor> inputs) {
  if (!at::GradMode::is_enabled()) return body(inputs);
  auto recipe = c10::make_intrusive<Recipe>(std::move(body), inputs);
  const auto differentiable = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (std::none_of(inputs.begin(), inputs.end(), differentiable)) {
    // Only a graph tells whether the body uses a trainable parameter.
    auto outputs = recipe->body(inputs);
    if (std::none_of(outputs.begin(), outputs.end(), differentiable)) return outputs;
    for (auto& output : outputs)
      recipe->outputs.push_back(output.defined() ? output.detach() : output);
  }
  const auto anchor = at::empty({0}).requires_grad_();
  return Checkpointed::apply(recipe, anchor, at::TensorList(inputs));
}

}  // namespace tessera::detail
