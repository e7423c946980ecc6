// A training loop on GPUs, one for each rank. With cpu in place of cuda it trains on CPUs.
//   tessera run -n 2 gpu_loop DEVICE WEIGHTS.safetensors
#include <tessera/tessera.h>

int main(int argc, char** argv) try {
  if (argc != 3) throw tessera::UsageError("expected: gpu_loop DEVICE WEIGHTS.safetensors");
  auto world = tessera::init_process_group();
  const auto device = tessera::device_of(argv[1], world.local_rank());
  const c10::DeviceGuard current(device);
  auto group = world.with_device(device);  // NCCL, or else through the host's memory

  torch::manual_seed(0);  // modules draw their weights on the CPU: the same on every device
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  net->to(device);  // before a wrapper and an optimizer see the parameters
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, group, tessera::default_optimizers().factory("AdamW", {{"lr", 1e-2}}));

  const int64_t own = 60 / world.size();  // samples of this rank in a step
  const auto points = torch::randn({600, 16});
  for (int step = 0; step < 100; ++step) {
    const int64_t first = step % 10 * 60 + world.rank() * own;
    const auto x = points.narrow(0, first, own).to(device);
    optimizer.zero_grad();
    auto loss = (net->forward(x) - x.square().mean(1, true)).square().mean();
    loss.backward();
    optimizer.clip_grad_norm_(1.0);  // the host waits only if the norm is read
    optimizer.step();
    if (step % 20 == 19) {
      auto mean = loss.detach().clone();
      group.all_reduce(mean, 1.0 / world.size());
      if (world.rank() == 0)  // item() makes the host wait for the GPU
        std::cout << "step " << step + 1 << ", loss " << mean.item<float>() << std::endl;
    }
  }
  // state_dict() copies to the CPU. Every rank has the whole model.
  if (world.rank() == 0) tessera::save_safetensors(argv[2], tessera::state_dict(*net));
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
