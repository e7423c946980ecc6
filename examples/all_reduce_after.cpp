// The program of all_reduce_before.cpp with Tessera: the optimizer averages the gradients, and
// each rank has a part of its state.

#include <tessera/tessera.h>

int main() try {
  auto world = tessera::init_process_group();

  torch::manual_seed(0);  // without it rank 0's weights are used
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, world,
      tessera::optimizer_factory<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3)));

  torch::manual_seed(1 + world.rank());  // every rank has its own data
  for (int step = 0; step < 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(net->forward(x), x.sum(1, true));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (world.rank() == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << loss.item<float>() << std::endl;
  }
  if (world.rank() == 0) torch::save(net, "after.pt");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
