// network_sim [SCHEDULES [FIRST_SEED]]
// Runs seeded schedules of a network in one process, with a simulated clock: delays, short reads
// and writes, strangers, flipped bits, lost connections, ranks that end or come again. Prints each
// schedule in which a message is wrong, an error names the wrong rank, or something never ends.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "sim/schedule.h"

int main(int argc, char** argv) {
  const uint64_t schedules = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 300;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  tessera::sim::Counts counts;
  uint64_t findings = 0;
  for (uint64_t seed = first; seed < first + schedules; ++seed) {
    const bool store = seed % 4 == 0;
    const auto finding =
        store ? tessera::sim::run_store(seed, counts) : tessera::sim::run_ranks(seed, counts);
    if (finding.empty()) continue;
    ++findings;
    std::printf("seed %llu (%s): %s\n", static_cast<unsigned long long>(seed),
                store ? "store" : "ranks", finding.c_str());
    std::fflush(stdout);
  }
  std::printf("%llu schedules, %llu findings\n", static_cast<unsigned long long>(schedules),
              static_cast<unsigned long long>(findings));
  for (const auto& [what, count] : counts)
    std::printf("  %-48s %lld\n", what.c_str(), static_cast<long long>(count));
  // A schedule that disturbs nothing shows nothing.
  bool disturbed = true;
  for (const char* const what :
       {"ranks: bits flipped in greetings", "ranks: bits flipped in messages and answers",
        "ranks: damage found, by rank and peer", "ranks: strangers", "ranks: ranks that ended",
        "ranks: cuts in messages and answers", "store: bits flipped", "store: connections lost",
        "store: connections made again", "store: strangers",
        "store: strangers that got their error"})
    disturbed = disturbed && (schedules < 300 || counts[what] > 0);
  if (!disturbed) std::printf("a kind of disturbance did not happen\n");
  return findings == 0 && disturbed ? 0 : 1;
}
