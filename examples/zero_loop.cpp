// A training loop of your own with a sharded optimizer. Runs on one rank, or on several:
// tessera run -n 4 ./zero_loop
#include <tessera/tessera.h>

int main() try {
  auto world = tessera::init_process_group();
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, world, tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}}));

  torch::manual_seed(world.rank());  // every rank has its own data
  for (int step = 0; step < 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(net->forward(x), x.sum(1, true));
    loss.backward();
    optimizer.step();  // averages the gradients, updates this rank's part, gathers the others'
    optimizer.zero_grad();
    if (world.rank() == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << loss.item<float>() << std::endl;
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
