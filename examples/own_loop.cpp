// A training loop of your own that can be stopped at any time and goes on from its checkpoint, with
// any number of ranks.
//   tessera run -n 2 own_loop STEPS
#include <csignal>
#include <cstdlib>

#include <tessera/tessera.h>

volatile std::sig_atomic_t stop_requested = 0;

int main(int argc, char** argv) try {
  const int64_t steps = argc > 1 ? std::atoll(argv[1]) : 200, batch = 60;
  auto world = tessera::init_process_group();
  for (int signal : {SIGTERM, SIGINT, SIGUSR1})
    std::signal(signal, [](int) { stop_requested = 1; });

  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(16, 64), torch::nn::Tanh(), torch::nn::Linear(64, 1));
  const auto points = torch::randn({1000, 16});
  tessera::Sampler sampler(points.size(0), tessera::SampleOrder::shuffled, /*seed=*/1);
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, world, tessera::default_optimizers().factory("AdamW", {{"lr", 1e-2}}));

  // All ranks go on from the newest checkpoint, if there is one.
  const tessera::CheckpointStore store("own_loop_run", world, {.keep_last = 2});
  const tessera::LoopParts parts(*net, optimizer);
  int64_t step = tessera::load(store, parts);
  if (step > 0 && world.rank() == 0) std::cout << "going on from step " << step << std::endl;

  // The samples of this rank. Ranks may have one more than others; batch is that of all ranks.
  const int64_t first = batch * world.rank() / world.size();
  const int64_t own = batch * (world.rank() + 1) / world.size() - first;
  auto stop = torch::zeros(1);
  while (step < steps && stop.item<float>() == 0) {
    const auto samples = sampler.samples(step * batch + first, own);
    const auto x = points.index_select(0, torch::tensor(samples));
    optimizer.param_groups()[0].options().set_lr(step < 100 ? 1e-2 : 1e-3);  // follows from step
    optimizer.zero_grad();
    auto loss = torch::mse_loss(net->forward(x), x.square().mean(1, true));
    (loss * tessera::sample_weight(world, own)).backward();
    optimizer.step();
    ++step;
    if (step % 20 == 0) tessera::save(store, step, parts);
    if (world.rank() == 0 && step % 20 == 0)
      std::cout << "step " << step << ", loss " << loss.item<float>() << std::endl;
    stop.fill_(stop_requested);
    world.all_reduce(stop);  // a signal to one rank stops all of them after the same step
  }
  if (step % 20 != 0) tessera::save(store, step, parts);
  if (stop.item<float>() > 0) return 1;  // stopped: this run is not complete
  if (world.rank() == 0) torch::save(net, "own_loop.pt");
} catch (const std::exception& error) {
  std::cerr << error.what() << std::endl;
  return 1;
}
