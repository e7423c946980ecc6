// DistributedDataParallel whose reductions go on during the optimizer's step and the next forward.
// One rank and two ranks compute the same: each step takes 64 samples over all ranks.
#include <tessera/tessera.h>

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "ddp.pt";
  auto world = tessera::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto all = torch::randn({64, 16});
  const auto x = all.chunk(world.size())[world.rank()], y = x.square().mean(1, true);

  tessera::DistributedDataParallel ddp(net, world, {.overlap = tessera::Overlap::background});
  tessera::FusedAdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 100; ++step) {
    net->zero_grad(/*set_to_none=*/true);
    torch::mse_loss(ddp(x), y).backward();
    optimizer.step();  // waits for nothing; the next forward does where it must
  }
  ddp.wait();  // torch::save() cannot wait
  if (world.rank() == 0) torch::save(net, path);
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
