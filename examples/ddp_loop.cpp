// DistributedDataParallel with an ordinary optimizer, accumulation and clipping. One rank and two
// ranks compute the same: each step takes 64 samples over all ranks.
#include <tessera/tessera.h>

int main(int argc, char** argv) try {
  const std::string path = argc > 1 ? argv[1] : "ddp.pt";
  auto world = tessera::init_process_group();
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto x = torch::randn({64, 16}), y = x.square().mean(1, true);
  const int64_t own = 64 / world.size() / 2;  // samples of a micro-batch on one rank

  tessera::DistributedDataParallel ddp(net, world);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  const auto backward = [&](int64_t micro_batch) {
    const int64_t first = (2 * world.rank() + micro_batch) * own;
    auto loss = torch::mse_loss(ddp(x.narrow(0, first, own)), y.narrow(0, first, own)) / 2;
    loss.backward();
    return loss.item<double>();
  };
  for (int step = 0; step < 100; ++step) {
    optimizer.zero_grad();
    double loss = 0;
    {
      auto accumulate = ddp.no_sync();  // nothing is sent in here
      loss += backward(0);
    }
    loss += backward(1);  // reduces the sum; each .grad is the mean over the ranks now
    torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
    auto mean = torch::full({1}, loss);
    world.all_reduce(mean, 1.0 / world.size());  // the loss of a rank is that of its own samples
    if (world.rank() == 0 && step % 20 == 19)
      std::cout << "step " << step + 1 << ", loss " << mean.item<float>() << std::endl;
  }
  if (world.rank() == 0) torch::save(net, path);
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
