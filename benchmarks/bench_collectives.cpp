// Times collectives, interleaved in one run: those in shared memory against a memcpy of the same
// number of bytes on all ranks at once, those over Gloo against c10d's. Forks one process per rank.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <unistd.h>

#include "tessera/process_group.h"

namespace {

struct Settings {
  int ranks = 2;
  int64_t mebibytes = 256;
  int rounds = 9;
  bool gloo = false;
  std::string json;
};

struct Case {
  std::string name;
  std::function<void()> body;
  double target = 0;  // largest ratio to `against`; 0: none
  std::string against = "memcpy";
  std::vector<double> milliseconds{};
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

tessera::ProcessGroup join(const std::string& folder, tessera::Backend backend) {
  std::filesystem::create_directories(folder);
  setenv("TESSERA_RENDEZVOUS", folder.c_str(), 1);
  tessera::ProcessGroupOptions options;
  options.backend = backend;
  options.tune_process = true;
  return tessera::init_process_group(options);
}

// Page-aligned, because the baseline is memcpy's better case: glibc's memcpy takes three times as
// long when the destination begins a few bytes after the source modulo 4096.
at::Tensor page_aligned(int64_t numel) {
  const size_t bytes = static_cast<size_t>(numel * 4 + 4095) / 4096 * 4096;
  return at::from_blob(
             std::aligned_alloc(4096, bytes), {numel}, [](void* data) { std::free(data); },
             at::kFloat)
      .fill_(1);
}

void report(const Settings& settings, const std::vector<Case>& cases) {
  const auto base_of = [&](const Case& entry) {
    const auto base = std::find_if(cases.begin(), cases.end(),
                                   [&](const Case& other) { return other.name == entry.against; });
    return median(base->milliseconds);
  };
  fmt::print("{} ranks, {} MiB, medians of {} interleaved rounds\n", settings.ranks,
             settings.mebibytes, settings.rounds);
  auto rows = nlohmann::json::array();
  for (const auto& entry : cases) {
    const double ms = median(entry.milliseconds), ratio = ms / base_of(entry);
    fmt::print("  {:<34} {:9.2f} ms  {:6.2f} of {}", entry.name, ms, ratio, entry.against);
    if (entry.target > 0)
      fmt::print("  target {:.2f} {}", entry.target, ratio <= entry.target ? "met" : "MISSED");
    fmt::print("\n");
    rows.push_back({{"name", entry.name},
                    {"ms", ms},
                    {"against", entry.against},
                    {"ratio", ratio},
                    {"target", entry.target}});
  }
  if (settings.json.empty()) return;
  std::ofstream(settings.json) << nlohmann::json{{"ranks", settings.ranks},
                                                 {"mebibytes", settings.mebibytes},
                                                 {"cases", rows}}
                                      .dump(2)
                               << "\n";
}

// Prints the time of a small all-reduce and of a barrier, in microseconds.
void report_latency(tessera::ProcessGroup& group, const char* name) {
  auto tensor = at::ones({16});
  const auto time = [&](const std::function<void()>& body) {
    constexpr int repeats = 500;
    for (int i = 0; i < 20; ++i) body();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) body();
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
               .count() /
           repeats;
  };
  const double reduce = time([&] { group.all_reduce(tensor); });
  const double barrier = time([&] { group.barrier(); });
  if (group.rank() == 0)
    fmt::print("  {}: all-reduce of 16 floats {:.1f} us, barrier {:.1f} us\n", name, reduce,
               barrier);
}

void run_rank(const Settings& settings, const std::string& folder) {
  at::set_num_threads(1);
  auto shm = join(folder + "/shm", tessera::Backend::SharedMemory);
  const int64_t numel = (settings.mebibytes << 20) / 4;
  const size_t bytes = static_cast<size_t>(numel) * 4;
  std::vector<int64_t> counts(settings.ranks, numel / settings.ranks);
  counts.back() += numel % settings.ranks;

  auto from = page_aligned(numel), to = page_aligned(numel), own = at::ones({numel});
  auto shared = shm.allocate(numel, at::kFloat);
  shared.fill_(1);
  const tessera::ProcessGroup::ConsumeRun discard = [](int64_t, const at::Tensor&) {};

  std::vector<Case> cases;
  cases.push_back({"memcpy", [&] { std::memcpy(to.data_ptr(), from.data_ptr(), bytes); }});
  cases.push_back({"reduce-scatter", [&] { shm.reduce_scatter(shared, counts); }, 0.7});
  cases.push_back(
      {"reduce-scatter, consumed", [&] { shm.reduce_scatter_each(shared, counts, discard); }, 0.7});
  cases.push_back({"all-gather", [&] { shm.all_gather(shared, counts); }, 1.0});
  cases.push_back({"all-reduce", [&] { shm.all_reduce(shared, 0.5); }, 1.8});
  cases.push_back({"reduce-scatter, staged", [&] { shm.reduce_scatter(own, counts); }});
  cases.push_back({"all-gather, staged", [&] { shm.all_gather(own, counts); }});
  cases.push_back({"all-reduce, staged", [&] { shm.all_reduce(own, 0.5); }});
  tessera::ProcessGroup gloo;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> c10d_gloo;
  std::vector<at::Tensor> listed;
  const auto mine = at::ones({counts[shm.rank()]});
  if (settings.gloo) {
    gloo = join(folder + "/gloo", tessera::Backend::Gloo);
    auto options = c10d::ProcessGroupGloo::Options::create(std::chrono::seconds(60));
    options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
    c10d_gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(
        c10::make_intrusive<c10d::FileStore>(folder + "/c10d", settings.ranks), gloo.rank(),
        settings.ranks, options);
    for (const auto count : counts) listed.push_back(at::ones({count}));
    cases.push_back({"all-reduce, c10d's Gloo", [&] {
                       std::vector<at::Tensor> tensors{own};
                       c10d_gloo->allreduce(tensors)->wait();
                     }});
    cases.push_back({"all-gather of lists, c10d's Gloo", [&] {
                       std::vector<std::vector<at::Tensor>> lists{listed};
                       std::vector<at::Tensor> inputs{mine};
                       c10d_gloo->allgather(lists, inputs)->wait();
                     }});
    cases.push_back({"reduce-scatter, Gloo", [&] { gloo.reduce_scatter(own, counts); }, 0.55,
                     "all-reduce, c10d's Gloo"});
    cases.push_back({"all-gather, Gloo", [&] { gloo.all_gather(own, counts); }, 0.45,
                     "all-gather of lists, c10d's Gloo"});
    cases.push_back(
        {"all-reduce, Gloo", [&] { gloo.all_reduce(own, 0.5); }, 0, "all-reduce, c10d's Gloo"});
  }
  for (int round = -1; round < settings.rounds; ++round) {
    for (auto& entry : cases) {
      shared.mul_(0.5);  // keeps sums finite and gives every case the same cache state
      shm.barrier();
      const auto begin = std::chrono::steady_clock::now();
      entry.body();
      shm.barrier();
      const auto end = std::chrono::steady_clock::now();
      if (round >= 0)
        entry.milliseconds.push_back(
            std::chrono::duration<double, std::milli>(end - begin).count());
    }
  }
  if (shm.rank() == 0) report(settings, cases);
  report_latency(shm, "shm");
  if (settings.gloo) report_latency(gloo, "Gloo");
  shm.barrier();
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times collectives in shared memory against memcpy");
  app.add_option("--ranks", settings.ranks, "Ranks on this host")->check(CLI::Range(2, 256));
  app.add_option("--mib", settings.mebibytes, "MiB of float32 a rank")->check(CLI::PositiveNumber);
  app.add_option("--rounds", settings.rounds, "Interleaved rounds")->check(CLI::PositiveNumber);
  app.add_flag("--gloo", settings.gloo, "Gloo too");
  app.add_option("--json", settings.json, "Write the table to this file");
  CLI11_PARSE(app, argc, argv);

  char name[] = "/tmp/tessera-bench-XXXXXX";
  const std::string folder = mkdtemp(name);
  std::vector<pid_t> children;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    const pid_t pid = fork();
    if (pid != 0) {
      children.push_back(pid);
      continue;
    }
    for (const auto& [key, value] :
         {std::pair("RANK", rank), std::pair("LOCAL_RANK", rank),
          std::pair("WORLD_SIZE", settings.ranks), std::pair("LOCAL_WORLD_SIZE", settings.ranks),
          std::pair("MASTER_PORT", 1)})
      setenv(key, std::to_string(value).c_str(), 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    int code = 0;
    try {
      run_rank(settings, folder);
    } catch (const std::exception& error) {
      fmt::print(stderr, "rank {}: {}\n", rank, error.what());
      code = 1;
    }
    std::fflush(nullptr);
    _exit(code);
  }
  int failed = 0;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    failed |= status;
  }
  std::filesystem::remove_all(folder);
  return failed == 0 ? 0 : 1;
}
