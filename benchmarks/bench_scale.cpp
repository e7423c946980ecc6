// Start-up, barrier and a small all-reduce of W ranks on H hosts, all on this machine: a process is
// a host, its threads are the ranks. Prints times, processor time, messages and bytes sent, memory
// and file descriptors for each rank, and how each grows with W.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <sys/resource.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "tessera/detail/torch_compat.h"

namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::json;

constexpr int64_t kSmall = 256;  // values of float32: 1 KiB

const std::vector<std::string> kFigures{
    "startup_ms",  "barrier_us",   "barrier_cpu_us", "reduce_us",   "reduce_cpu_us", "barrier_msgs",
    "reduce_msgs", "reduce_bytes", "split_msgs",     "private_mib", "descriptors",   "sockets"};

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return t.tv_sec + 1e-6 * t.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

/// Memory that no other process shares, written since fork().
double private_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    double kib = 0;
    if (word == "Private_Dirty:" && file >> kib) return kib / 1024;
  }
  return 0;
}

std::pair<int, int> descriptors_and_sockets() {
  int all = 0, sockets = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    ++all;
    sockets +=
        std::filesystem::read_symlink(entry.path(), ignored).string().rfind("socket:", 0) == 0;
  }
  return {all, sockets};
}

struct Settings {
  std::vector<int> worlds{2, 4, 8, 16, 32, 64, 128, 256};
  int hosts = 16;
  int repeats = 30;
  std::string json;
};

/// The ranks of host `host`, as threads. Returns this host's figures.
Json run_host(const Settings& settings, int world, int hosts, int host, uint16_t port) {
  auto options = tessera::compat::without_libuv(c10d::TCPStoreOptions());
  options.port = port;
  options.isServer = host == 0;
  options.waitWorkers = false;
  auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  std::vector<int> places, here;
  for (int rank = 0; rank < world; ++rank) {
    places.push_back(rank * hosts / world);
    if (places.back() == host) here.push_back(rank);
  }
  const double memory_before = private_mib();
  const auto [descriptors_before, sockets_before] = descriptors_and_sockets();
  Json figures;
  std::vector<std::thread> threads;
  std::atomic<int> failed{0};
  for (const int rank : here) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        tessera::ProcessGroupOptions group_options;
        group_options.timeout = std::chrono::minutes(5);
        auto place = tessera::comm::World::start(rank, world, group_options);
        // Of its own: a rank that waits for a key would block the calls of the others.
        auto client = options;
        client.isServer = false;
        place.store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", client);
        place.hosts = places;
        // c10d's client tries again after a second, which is not part of the start-up.
        place.store->add("ready", 1);
        while (place.store->add("ready", 0) < world)
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        place.address = fmt::format("127.0.0.{}", 2 + host);
        place.same_host = hosts == 1;
        const bool leads = rank == here[0];
        const auto begin = Clock::now();
        auto transport = tessera::comm::make_transport(place);
        tessera::ProcessGroup group(
            std::make_shared<tessera::ProcessGroup::Impl>(std::move(place), std::move(transport)));
        group.barrier();
        if (leads) figures["startup_ms"] = 1e3 * seconds_since(begin);
        // The first rank of a host sends the most.
        const auto count = [&](const std::string& name, const std::function<void()>& body) {
          const auto before = group.impl()->transport->sent();
          body();
          const auto after = group.impl()->transport->sent();
          if (!leads) return;
          figures[name + "_msgs"] = static_cast<double>(after.messages - before.messages);
          figures[name + "_bytes"] = static_cast<double>(after.bytes - before.bytes);
        };
        const auto measure = [&](const std::string& name, const std::function<void()>& body) {
          body();
          group.barrier();
          const double processor = processor_seconds();
          const auto start = Clock::now();
          for (int i = 0; i < settings.repeats; ++i) body();
          if (leads) figures[name + "_us"] = 1e6 * seconds_since(start) / settings.repeats;
          group.barrier();
          if (!leads) return;
          figures[name + "_cpu_us"] = 1e6 * (processor_seconds() - processor) / settings.repeats /
                                      static_cast<double>(here.size());
        };
        for (int i = 0; i < 3; ++i) group.barrier();
        measure("barrier", [&] { group.barrier(); });
        auto values = at::ones({kSmall});
        measure("reduce", [&] { group.all_reduce(values, 1.0 / world); });
        count("barrier", [&] { group.barrier(); });
        count("reduce", [&] { group.all_reduce(values, 1.0 / world); });
        count("split", [&] { (void)group.split(-1); });
        if (leads) {
          const auto [descriptors, sockets] = descriptors_and_sockets();
          const auto ranks = static_cast<double>(here.size());
          figures["private_mib"] = (private_mib() - memory_before) / ranks;
          figures["descriptors"] = (descriptors - descriptors_before) / ranks;
          figures["sockets"] = (sockets - sockets_before) / ranks;
        }
        group.barrier();
      } catch (const std::exception& error) {
        fmt::print(stderr, "rank {} of {}: {}\n", rank, world, error.what());
        ++failed;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (failed) std::exit(1);
  return figures;
}

/// The figures of host 0.
Json run_world(const Settings& settings, int world, uint16_t port) {
  const int hosts = std::min(settings.hosts, world);
  int results[2];
  if (pipe(results) != 0) std::exit(1);
  std::vector<pid_t> children;
  for (int host = 0; host < hosts; ++host) {
    const pid_t child = fork();
    if (child == 0) {
      const auto text = run_host(settings, world, hosts, host, port).dump() + "\n";
      if (host == 0 && write(results[1], text.data(), text.size()) < 0) std::_Exit(1);
      usleep(500000);  // host 0 serves the store until the others have ended
      std::_Exit(0);
    }
    children.push_back(child);
  }
  close(results[1]);
  bool failed = false;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    failed = failed || status != 0;
  }
  if (failed) {
    fmt::print(stderr, "{} ranks on {} hosts failed\n", world, hosts);
    std::exit(1);
  }
  std::string text(4096, 0);
  text.resize(
      static_cast<size_t>(std::max<ssize_t>(0, read(results[0], text.data(), text.size()))));
  close(results[0]);
  auto figures = Json::parse(text);
  figures["world"] = world;
  figures["hosts"] = hosts;
  return figures;
}

/// The exponent b of the power law c W^b through the figures, by least squares of the logarithms.
double growth(const std::vector<Json>& rows, const std::string& name) {
  double n = 0, sx = 0, sy = 0, sxx = 0, sxy = 0;
  for (const auto& row : rows) {
    const double x = std::log(row["world"].get<double>());
    const double y = std::log(std::max(1e-9, row[name].get<double>()));
    n += 1, sx += x, sy += y, sxx += x * x, sxy += x * y;
  }
  return (n * sxy - sx * sy) / (n * sxx - sx * sx);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Measures how start-up and small collectives grow with the number of ranks.");
  app.add_option("--worlds", settings.worlds, "numbers of ranks")->delimiter(',');
  app.add_option("--hosts", settings.hosts, "hosts, as far as there are ranks");
  app.add_option("--repeats", settings.repeats, "collectives of one measurement");
  app.add_option("--json", settings.json, "also write the figures here");
  CLI11_PARSE(app, argc, argv);
  rlimit files{};  // 16 ranks of 256 need 4080 connections
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  std::vector<Json> rows;
  auto port = static_cast<uint16_t>(20000 + getpid() % 10000);
  fmt::print("{:>6} {:>6}", "ranks", "hosts");
  for (const auto& name : kFigures) fmt::print(" {:>14}", name);
  fmt::print("\n");
  for (const int world : settings.worlds) {
    const auto& row = rows.emplace_back(run_world(settings, world, port++));
    fmt::print("{:>6} {:>6}", world, row["hosts"].get<int>());
    for (const auto& name : kFigures) fmt::print(" {:>14.2f}", row[name].get<double>());
    fmt::print("\n");
    std::fflush(stdout);
  }
  fmt::print("{:>13}", "grows as W^");
  for (const auto& name : kFigures) fmt::print(" {:>14.2f}", growth(rows, name));
  fmt::print("\n");
  if (!settings.json.empty()) std::ofstream(settings.json) << Json(rows).dump(1) << "\n";
}
