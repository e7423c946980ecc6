// fault_probe BACKEND TIMEOUT_MS
//     [zero | fsdp | branches | leaves | fails | agrees | recovers | apart | worlds]
//     [print | quiet | uncaught]
// A rank that trains until it or a peer fails. It checks sums over all ranks and over the ranks of
// its host, prints its pid and starts to train. With "branches", the last rank takes another branch
// of the model at step 6, and training ends at step 12. With "leaves", rank 1 calls exit(0) at step
// 6; with "fails", it calls ProcessGroup::fail(); with "agrees", it throws in agree(); with
// "recovers", all ranks catch that, and rank 0 exits with 7 two steps later. With "apart", rank 2
// waits to be killed at step 6. Rank 0 waits for it in a group without rank 1, the others in the
// group of all. With "worlds", it makes 100 worlds one after the other and trains nothing. The last
// argument says what is done with an error: it is printed, or ends the program without a word, or
// is not caught.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include "tessera/tessera.h"

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(300, 300));
    middle = register_module("middle", torch::nn::Linear(300, 300));
    last = register_module("last", torch::nn::Linear(300, 300));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    if (!skips) x = middle(x);
    return last(x);
  }
  torch::nn::Linear first{nullptr}, middle{nullptr}, last{nullptr};
  bool skips = false;
};
TORCH_MODULE(Net);

/// Rank 0 waits in `other` for rank 2, the others in `world`.
void wait_apart(tessera::ProcessGroup& world, tessera::ProcessGroup& other) {
  std::printf("rank %d waits apart\n", world.rank());
  std::fflush(stdout);
  while (world.rank() == 2) ::pause();
  auto values = torch::ones({7});
  (world.rank() == 0 ? other : world).all_reduce(values);
}

/// What goes wrong on rank 1, as seen by all ranks.
void misbehave(const std::string& how, tessera::ProcessGroup& world, long step) {
  const bool here = world.rank() == 1;
  if (how == "recovers" && step == 8 && world.rank() == 0) std::_Exit(7);
  if (step != 6) return;
  if (how == "leaves" && here) std::exit(0);
  if (how == "fails" && here) world.fail("the probe fails on purpose");
  if (how != "agrees" && how != "recovers") return;
  try {
    tessera::agree(world, [&] {
      if (here) throw tessera::UsageError("the probe finds an error");
    });
  } catch (const tessera::UsageError&) {
    if (how == "agrees") throw;
  }
}

int make_worlds(const tessera::ProcessGroupOptions& options) {
  constexpr int kWorlds = 100;
  int rank = -1;
  for (int i = 0; i < kWorlds; ++i) {
    auto world = tessera::init_process_group(options);
    rank = world.rank();
    auto sum = torch::full({7}, i);
    world.all_reduce(sum);
    if (!torch::equal(sum, torch::full({7}, i * world.size()))) return 5;
  }
  std::printf("rank %d made %d worlds\n", rank, kWorlds);
  return 0;
}

int main(int argc, char** argv) {
  const std::string errors = argc > 4 ? argv[4] : "print";
  tessera::ProcessGroupOptions options;
  if (std::strcmp(argv[1], "auto") != 0)
    options.backend = std::strcmp(argv[1], "gloo") == 0  ? tessera::Backend::Gloo
                      : std::strcmp(argv[1], "tcp") == 0 ? tessera::Backend::TCP
                                                         : tessera::Backend::SharedMemory;
  int rank = -1;
  try {
    if (argc > 3 && std::strcmp(argv[3], "worlds") == 0) return make_worlds(options);
    auto world = tessera::init_process_group(options);
    rank = world.rank();
    torch::set_num_threads(1);
    auto local = world.split(std::atoi(std::getenv("GROUP_RANK"))).value();
    for (auto* group : {&world, &local}) {
      auto sums =
          torch::arange(300'000, torch::kDouble) + rank;  // exact, and too large for one message
      group->all_reduce(sums);
      double expected = 0;
      for (const int member : group->world_ranks()) expected += member;
      const bool right =
          torch::equal(sums, torch::arange(300'000, torch::kDouble) * group->size() + expected);
      std::printf("rank %d: %s sum of %d on %s\n", rank, right ? "right" : "WRONG", group->size(),
                  group->backend_name().c_str());
    }
    std::printf("rank %d: local rank %d of %d\n", rank, world.local_rank(), world.local_size());
    world.barrier();
    world.set_timeout(std::chrono::milliseconds(
        std::atoi(argv[2])));  // not before, because start-up may take long on a busy machine
    const std::string strategy = argc > 3 ? argv[3] : "zero";
    auto other = world;
    if (strategy == "apart") other = world.split(rank == 1).value();
    const auto adamw = tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}});
    Net net;
    std::unique_ptr<tessera::FullyShardedDataParallel<Net>> fsdp;
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (strategy != "fsdp" && strategy != "branches") {
      optimizer = std::make_unique<tessera::ZeroRedundancyOptimizer>(*net, world, adamw);
    } else {
      fsdp = std::make_unique<tessera::FullyShardedDataParallel<Net>>(
          net, world,
          tessera::FullyShardedDataParallelOptions{.wrap_policy = tessera::wrap_leaves()});
      optimizer = adamw({torch::optim::OptimizerParamGroup(fsdp->parameters())});
    }
    for (long step = 0;; ++step) {
      net->skips = strategy == "branches" && step == 6 && rank == world.size() - 1;
      misbehave(strategy, world, step);
      if (strategy == "apart" && step == 6) wait_apart(world, other);
      const auto x = torch::ones({8, 300});
      (fsdp ? (*fsdp)(x) : net(x)).square().mean().backward();
      optimizer->step();
      optimizer->zero_grad();
      if (strategy == "branches" && step == 12) return 0;
      if (step == 3)
        std::printf("pid %d of rank %d on %s\n", ::getpid(), rank, world.backend_name().c_str()),
            std::fflush(stdout);
    }
  } catch (const tessera::BrokenWorldError& error) {
    if (errors == "uncaught") throw;
    if (errors == "quiet") return 3;
    std::string blamed;
    for (const int r : error.ranks()) blamed += " " + std::to_string(r);
    std::fprintf(stderr, "survivor %d blames%s: %s\n", rank, blamed.c_str(), error.what());
    return 3;
  } catch (const std::exception& error) {
    if (errors == "uncaught") throw;
    if (errors == "quiet") return 4;
    std::fprintf(stderr, "survivor %d: other error: %s\n", rank, error.what());
    return 4;
  }
}
