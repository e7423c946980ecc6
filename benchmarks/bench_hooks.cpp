// Runs one training job of `tessera train` and reports what its gradients cost to send.
//
//   tessera run -n RANKS bench_hooks CONFIG.yaml [key=value …]
//
// The last line that rank 0 prints is one JSON object: all-reduce bytes that a rank sent per step,
// mean loss of the last ten steps, evaluation loss. benchmarks/hooks.py runs this program with
// several hooks and prints a table.

#include <algorithm>
#include <exception>
#include <iostream>
#include <numeric>

#include <nlohmann/json.hpp>

#include "tessera/process_group.h"
#include "tessera/train.h"
#include "tessera/train/config.h"

int main(int argc, char** argv) {
  try {
    if (argc < 2) throw std::runtime_error("usage: bench_hooks CONFIG.yaml [key=value ...]");
    const auto config = tessera::load_config(argv[1], {argv + 2, argv + argc});
    auto group = tessera::init_process_group(config.parallel.group);
    const auto result = tessera::run_training(config, group);
    if (group.rank() != 0) return 0;
    const auto steps = static_cast<std::ptrdiff_t>(result.losses.size());
    const auto last = std::min<std::ptrdiff_t>(steps, 10);
    nlohmann::json line{
        {"ranks", group.size()},
        {"steps", steps},
        {"bytes_per_step", group.stats().all_reduce.bytes_sent / static_cast<uint64_t>(steps)},
        {"loss", std::accumulate(result.losses.end() - last, result.losses.end(), 0.0) /
                     static_cast<double>(last)}};
    if (result.eval_loss) line["eval_loss"] = *result.eval_loss;
    std::cout << line.dump() << std::endl;
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "bench_hooks: " << error.what() << std::endl;
    return 1;
  }
}
