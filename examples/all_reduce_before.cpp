// Data parallelism by hand, with libtorch alone: every rank has the whole model and the whole
// optimizer state, and the gradients are averaged one by one after backward.

#include <cstdlib>
#include <iostream>

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/torch.h>

int main() try {
  const int rank = std::stoi(std::getenv("RANK")), size = std::stoi(std::getenv("WORLD_SIZE"));
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  c10d::ProcessGroupGloo world(c10::make_intrusive<c10d::FileStore>("store", size), rank, size,
                               options);

  torch::manual_seed(0);  // the same weights on every rank
  torch::nn::Sequential net(torch::nn::Linear(64, 256), torch::nn::Tanh(),
                            torch::nn::Linear(256, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));

  torch::manual_seed(1 + rank);  // every rank has its own data
  for (int step = 0; step < 100; ++step) {
    auto x = torch::randn({32, 64});
    auto loss = torch::mse_loss(net->forward(x), x.sum(1, true));
    loss.backward();
    for (auto& p : net->parameters()) {
      std::vector<at::Tensor> gradient{p.grad()};
      world.allreduce(gradient)->wait();
      p.mutable_grad() /= size;
    }
    optimizer.step();
    optimizer.zero_grad();
    if (rank == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << loss.item<float>() << std::endl;
  }
  if (rank == 0) torch::save(net, "before.pt");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
