// fault_ranks KIND
// Two or more ranks of the library without the trainer. One of them makes the mistake KIND. Every
// rank prints "rank R: broken world: …" (exit code 3), "rank R: usage: …" (4) or "rank R: no
// error".
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include <torch/nn/modules/linear.h>

#include "tessera/tessera.h"

namespace {

using tessera::ProcessGroup;

void step(ProcessGroup world, const std::string& name, double lr, double later) {
  torch::nn::Linear net(8, 4);
  tessera::ZeroRedundancyOptimizer optimizer(
      *net, world, tessera::default_optimizers().factory(name, {{"lr", lr}}));
  for (int i = 0; i < 4; ++i) {
    if (i == 2 && later > 0)
      for (auto& group : optimizer.param_groups()) group.options().set_lr(later);
    net(torch::ones({3, 8})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

const std::map<std::string, std::function<void(ProcessGroup, bool)>> kMistakes = {
    {"order",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({4}), b = torch::ones({4});
       if (odd) {
         world.broadcast(b, 0);
         world.all_reduce(a);
       } else {
         world.all_reduce(a);
         world.broadcast(b, 0);
       }
     }},
    {"sizes",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({odd ? 5 : 4});
       world.all_reduce(a);
     }},
    {"dtypes",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({4}, odd ? torch::kInt : torch::kFloat);
       world.all_reduce(a);
     }},
    {"scale",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({4});
       world.all_reduce(a, odd ? 1 : 1.0 / world.size());
     }},
    {"tags",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({4}), b = torch::ones({4});
       world.all_reduce(odd ? b : a, 1, odd ? "b" : "a");
       world.all_reduce(odd ? a : b, 1, odd ? "a" : "b");
     }},
    {"leaves",
     [](ProcessGroup world, bool odd) {
       auto a = torch::ones({4});
       if (!odd) world.all_reduce(a);
     }},
    {"class", [](ProcessGroup world, bool odd) { step(world, odd ? "Adam" : "AdamW", 1e-3, 0); }},
    {"options", [](ProcessGroup world, bool odd) { step(world, "AdamW", odd ? 1e-2 : 1e-3, 0); }},
    {"schedule",
     [](ProcessGroup world, bool odd) { step(world, "AdamW", 1e-3, odd ? 1e-2 : 1e-4); }},
};

}  // namespace

int main(int argc, char** argv) {
  int rank = -1;
  try {
    auto world = tessera::init_process_group();
    rank = world.rank();
    torch::set_num_threads(1);
    kMistakes.at(argc > 1 ? argv[1] : "")(world, rank == world.size() - 1);
    std::printf("rank %d: no error\n", rank);
    return 0;
  } catch (const tessera::BrokenWorldError& error) {
    std::fprintf(stderr, "rank %d: BrokenWorldError: %s\n", rank, error.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: usage: %s\n", rank, error.what());
    return 4;
  }
}
