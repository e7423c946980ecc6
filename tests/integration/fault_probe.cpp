// A rank that trains for ever: sums with all and with its host's ranks, prints its pid, then steps until something happens to it or to a peer.
#include "tessera/tessera.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

int main(int argc, char** argv) {
  tessera::ProcessGroupOptions options;
  if (std::strcmp(argv[1], "auto") != 0) options.backend = std::strcmp(argv[1], "gloo") == 0 ? tessera::Backend::Gloo : tessera::Backend::SharedMemory;
  int rank = -1;
  try {
    auto world = tessera::init_process_group(options);
    rank = world.rank();
    torch::set_num_threads(1);
    auto local = world.split(std::atoi(std::getenv("GROUP_RANK"))).value();
    for (auto* group : {&world, &local}) {
      auto sums = torch::arange(300'000, torch::kDouble) + rank;  // exact, and too large for one message
      group->all_reduce(sums);
      double expected = 0;
      for (const int member : group->world_ranks()) expected += member;
      const bool right = torch::equal(sums, torch::arange(300'000, torch::kDouble) * group->size() + expected);
      std::printf("rank %d: %s sum of %d on %s\n", rank, right ? "right" : "WRONG", group->size(), group->backend_name().c_str());
    }
    world.barrier();
    world.set_timeout(std::chrono::milliseconds(std::atoi(argv[2])));  // only now: meeting may take long on a busy machine
    torch::nn::Linear net(300, 300);
    tessera::ZeroRedundancyOptimizer optimizer(*net, world, tessera::default_optimizers().factory("AdamW", {{"lr", 1e-3}}));
    for (long step = 0;; ++step) {
      net(torch::ones({8, 300})).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
      if (step == 3) std::printf("pid %d of rank %d on %s\n", ::getpid(), rank, world.backend_name().c_str()), std::fflush(stdout);
    }
  } catch (const tessera::BrokenWorldError& error) {
    std::string blamed;
    for (const int r : error.ranks()) blamed += " " + std::to_string(r);
    std::fprintf(stderr, "survivor %d blames%s: %s\n", rank, blamed.c_str(), error.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "survivor %d: other error: %s\n", rank, error.what());
    return 4;
  }
}
