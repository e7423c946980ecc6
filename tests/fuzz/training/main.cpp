// Trains random models in random ways and compares with plain libtorch. See docs/fuzzing.md.

#include <chrono>
#include <iostream>
#include <memory>
#include <vector>

#include <CLI/CLI.hpp>
#include <poll.h>

#include "fuzz/training/worker.h"

namespace {

using Clock = std::chrono::steady_clock;
using tessera::fuzz::Worker;

struct Arguments {
  uint64_t from = 0, seeds = 1000;
  int jobs = 2, patience = 30, trials = 150;
  double seconds = 0;
  bool show = false, stop_at_first = false;
};

void report(const Worker::Report& found, const Arguments& arguments) {
  const auto& finding = *found.finding;
  const auto original = tessera::fuzz::generate(found.seed);
  std::cout << "seed " << found.seed << ": " << finding.kind << ": " << finding.text << "\n"
            << one_line(original) << std::endl;
  if (arguments.trials == 0 || arguments.stop_at_first) return;
  const std::chrono::seconds patience(arguments.patience);
  const auto small = shrink(original, finding.kind, patience, arguments.trials);
  const auto again = run_in_child(small, patience);
  std::cout << "\n"
            << reproducer(small, again ? again->kind + ": " + again->text
                                       : finding.kind + ": not every time: " + finding.text)
            << std::endl;
}

int fuzz(const Arguments& arguments) {
  std::vector<std::unique_ptr<Worker>> workers;
  const auto end = arguments.from + arguments.seeds;
  for (int job = 0; job < arguments.jobs; ++job)
    workers.push_back(std::make_unique<Worker>(
        tessera::fuzz::generate, arguments.from + static_cast<uint64_t>(job), arguments.jobs, end,
        std::chrono::seconds(arguments.patience)));
  const auto begun = Clock::now();
  std::vector<Worker::Report> findings;
  uint64_t done = 0;
  const auto in_time = [&] {
    return arguments.seconds <= 0 ||
           Clock::now() - begun < std::chrono::duration<double>(arguments.seconds);
  };
  bool working = true;
  while (working && in_time() && !(arguments.stop_at_first && !findings.empty())) {
    working = false;
    std::vector<pollfd> waiting;
    for (const auto& worker : workers)
      if (!worker->done()) waiting.push_back({worker->descriptor(), POLLIN, 0});
    poll(waiting.data(), waiting.size(), 200);
    for (const auto& worker : workers) {
      while (const auto ended = worker->next(Clock::now())) {
        ++done;
        if (ended->finding) {
          findings.push_back(*ended);
          std::cout << "seed " << ended->seed << ": " << ended->finding->kind << std::endl;
        }
        if (done % 1000 == 0) std::cout << done << " seeds" << std::endl;
      }
      working = working || !worker->done();
    }
  }
  workers.clear();
  for (const auto& found : findings) report(found, arguments);
  std::cout << done << " seeds from " << arguments.from << ", " << findings.size() << " findings"
            << std::endl;
  return findings.empty() && done > 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Trains random models in random ways and compares with plain libtorch.");
  app.add_option("--from", arguments.from, "First seed")->capture_default_str();
  app.add_option("--seeds", arguments.seeds, "Number of seeds")->capture_default_str();
  app.add_option("--jobs", arguments.jobs, "Processes")->capture_default_str();
  app.add_option("--patience", arguments.patience, "Seconds after which a case hangs")
      ->capture_default_str();
  app.add_option("--shrink", arguments.trials, "Attempts to shrink a finding; 0: none")
      ->capture_default_str();
  app.add_option("--seconds", arguments.seconds, "Ends after this time; 0: no limit")
      ->capture_default_str();
  app.add_flag("--stop-at-first", arguments.stop_at_first,
               "Ends with the first finding, without shrinking it");
  app.add_flag("--show", arguments.show, "Prints the cases and runs none");
  CLI11_PARSE(app, argc, argv);
  if (arguments.show) {
    for (uint64_t i = 0; i < arguments.seeds; ++i)
      std::cout << arguments.from + i << ": "
                << one_line(tessera::fuzz::generate(arguments.from + i)) << "\n";
    return 0;
  }
  return fuzz(arguments);
}
