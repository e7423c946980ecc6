// Times an all-reduce and an all-gather of 64 MiB between two hosts of one rank each, for
// streams.py. Rank 0 prints a line of JSON: bits a second that a host sends, by collective.
#include <algorithm>
#include <chrono>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/process_group.h"

int main() {
  using Clock = std::chrono::steady_clock;
  constexpr int64_t kNumel = 16 << 20;
  auto world = tessera::init_process_group();
  auto sum = at::ones({kNumel}), table = at::ones({2 * kNumel});
  const std::vector<std::pair<std::string, std::function<void()>>> cases{
      {"all-reduce", [&] { world.all_reduce(sum, 0.5); }},
      {"all-gather", [&] {
         world.all_gather(table, {kNumel, kNumel});
       }}};
  nlohmann::json results;
  for (const auto& [name, run] : cases) {
    std::vector<double> seconds;
    for (int i = 0; i < 13; ++i) {
      world.barrier();
      const auto start = Clock::now();
      run();
      world.barrier();
      seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    results[name] = kNumel * 4 * 8 / seconds[seconds.size() / 2];
  }
  if (world.rank() == 0) std::cout << results.dump() << std::endl;
}
