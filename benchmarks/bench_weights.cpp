// Reads this rank's part of every tensor of a folder of weights, as FullyShardedDataParallel does,
// and prints the seconds until all ranks have it. For benchmarks/weights.py.
//
//   tessera run -n 2 bench_weights FOLDER [RUNS]

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "tessera/tessera.h"

namespace {

using Clock = std::chrono::steady_clock;

/// Into memory that was there before, as the shards of a model are.
void read_part(const std::string& folder, int rank, int size, at::Tensor& memory) {
  const tessera::Weights weights(folder);
  int64_t used = 0;
  for (const auto& entry : weights.entries()) {
    const int64_t numel = entry.numel(), from = numel * rank / size, to = numel * (rank + 1) / size;
    weights.load_slice(entry.name, from, to - from, memory.narrow(0, used, to - from));
    used += to - from;
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  auto group = tessera::init_process_group();
  int64_t elements = 0;
  const tessera::Weights weights(argv[1]);
  for (const auto& entry : weights.entries())
    elements += entry.numel() * (group.rank() + 1) / group.size() -
                entry.numel() * group.rank() / group.size();
  auto memory = at::zeros({elements});
  for (int run = 0; run < (argc > 2 ? std::atoi(argv[2]) : 1); ++run) {
    group.barrier();
    const auto begin = Clock::now();
    read_part(argv[1], group.rank(), group.size(), memory);
    group.barrier();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    if (group.rank() == 0) std::printf("%.4f\n", seconds);
  }
}
