// Goes on with a training of Python, {"model": …, "optimizer": …} in checkpoint.pt, and gives the
// weights and AdamW's state back to Python.

#include <tessera/tessera.h>

int main() try {
  torch::nn::Linear model(3, 2);
  const tessera::Weights weights("checkpoint.pt", {.key = "model"});
  tessera::load_state_dict(*model, weights);

  torch::optim::AdamW optimizer(model->parameters());
  const auto parameters = tessera::named_parameters(*model);
  std::vector<std::string> names;
  for (const auto& [name, parameter] : parameters) names.push_back(name);
  tessera::load_state_dict(optimizer, parameters,
                           tessera::load_torch_optimizer_state("checkpoint.pt", names));

  model->forward(torch::ones({1, 3})).sum().backward();
  optimizer.step();

  tessera::save_torch_file("model.pt", tessera::state_dict(*model));
  tessera::save_torch_optimizer_state(tessera::state_dict(optimizer, parameters), "optimizer.pt");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
