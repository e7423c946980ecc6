// A program with MPI of its own, for mpi_test.py: mpi_program LEVEL CASE,…. LEVEL: single,
// funneled, serialized or multiple, for MPI_Init_thread(). Ends with code 1 if a check fails.
#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <thread>

#include <dirent.h>
#include <fcntl.h>
#include <malloc.h>
#include <unistd.h>

#include "mpi/cases.h"
#include "tessera/mpi.h"

namespace {

using namespace tessera;
using namespace std::chrono_literals;
using testing::expect;
using testing::expect_sums;
using Clock = std::chrono::steady_clock;

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = 0;
  MPI_Comm_size(comm, &size);
  return size;
}

/// The message of the error that `call` throws; "nothing" if it throws none.
std::string thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "nothing";
}

/// A line in one piece, to the file LINES that the ranks share: mpirun loses output of a job that
/// it ends.
void say(const std::string& name, const std::string& text) {
  const auto line = name + ": " + text + "\n";
  const char* const path = std::getenv("LINES");
  const int file = ::open(path ? path : "/dev/stdout", O_WRONLY | O_APPEND | O_CREAT, 0600);
  [[maybe_unused]] const auto written = ::write(file, line.data(), line.size());
  ::close(file);
}

ProcessGroupOptions over_mpi() {
  ProcessGroupOptions options;
  options.backend = Backend::MPI;
  return options;
}

/// The group is that of the communicator, and not of the launcher's variables.
void start() {
  std::ostringstream times;
  for (int i = 0; i < 5; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    const auto begin = Clock::now();
    auto world = init_process_group(MPI_COMM_WORLD);
    const std::chrono::duration<double, std::milli> took = Clock::now() - begin;
    times << ' ' << took.count();
    expect(world.rank() == rank_in(MPI_COMM_WORLD), "rank");
    expect(world.size() == size_of(MPI_COMM_WORLD), "size");
    expect_sums(world);
    const auto found = default_process_group();
    expect(found && found->size() == world.size(), "the default group");
    if (i == 0 && world.rank() == 0)
      std::cout << "backend " << world.backend_name() << ", local " << world.local_rank() << " of "
                << world.local_size() << std::endl;
  }
  if (rank_in(MPI_COMM_WORLD) == 0) std::cout << "start ms" << times.str() << std::endl;
}

/// Halves with reversed ranks, the whole, and each rank alone, one beside the other.
void communicators(const ProcessGroupOptions& options) {
  const int rank = rank_in(MPI_COMM_WORLD);
  MPI_Comm half = MPI_COMM_NULL, reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half);
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  auto part = init_process_group(half, options);
  auto whole = init_process_group(reversed, options);
  auto alone = init_process_group(MPI_COMM_SELF, options);
  expect(part.rank() == rank_in(half) && part.size() == size_of(half), "the half");
  expect(whole.rank() == rank_in(reversed), "the reversed world");
  expect(alone.rank() == 0 && alone.size() == 1, "a rank alone");
  MPI_Comm_free(&half);  // the groups do not use it
  for (auto* group : {&part, &whole, &part, &alone}) expect_sums(*group);
  // Each from a thread of its own.
  std::string problem = "nothing";
  {
    const std::jthread other([&] {
      problem = thrown([&] {
        for (int i = 0; i < 20; ++i) expect_sums(part);
      });
    });
    for (int i = 0; i < 20; ++i) expect_sums(whole);
  }
  expect(problem == "nothing", problem);
  if (auto nested = whole.split(whole.rank() / 2)) expect_sums(*nested);
  expect_sums(whole.duplicate());
  MPI_Comm_free(&reversed);
}

void wrappers(const ProcessGroupOptions& options) {
  testing::expect_parity(init_process_group(MPI_COMM_WORLD, options));
}

/// A barrier without the busy waits of MPI's.
void meet() {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(MPI_COMM_WORLD, &request);
  int done = 0;
  while (MPI_Test(&request, &done, MPI_STATUS_IGNORE), !done) std::this_thread::sleep_for(1ms);
}

/// Worlds of `first` ranks to all, as communicators of their own.
void worlds(int first, const ProcessGroupOptions& options) {
  const int rank = rank_in(MPI_COMM_WORLD);
  for (int size = first; size <= size_of(MPI_COMM_WORLD); ++size) {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank < size ? 0 : MPI_UNDEFINED, rank, &part);
    if (part != MPI_COMM_NULL) {
      auto world = init_process_group(part, options);
      expect(world.size() == size, "the ranks of the communicator");
      testing::expect_parity(world);
      MPI_Comm_free(&part);
    }
    meet();
  }
}

/// Every wrong call has an error, and the next right one works.
void refused() {
  const auto with = [](ProcessGroupOptions options) {
    return thrown([&] { init_process_group(MPI_COMM_WORLD, options); });
  };
  const int rank = rank_in(MPI_COMM_WORLD), last = size_of(MPI_COMM_WORLD) - 1;
  if (rank == 0) say("null", thrown([] { init_process_group(MPI_Comm(MPI_COMM_NULL)); }));
  MPI_Comm half = MPI_COMM_NULL, inter = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 7, &inter);
  say("inter", thrown([&] { init_process_group(inter); }));
  MPI_Comm_free(&inter);
  MPI_Comm_free(&half);
  ProcessGroupOptions options;
  options.timeout = rank == last ? 5000ms : 60000ms;
  say("differ", with(options));
  options.timeout = rank == last ? 0ms : 60000ms;
  say("timeout", with(options));
  options = {};
  options.backend = rank == last ? Backend::TCP : Backend::Auto;
  say("backend", with(options));
  auto world = init_process_group(MPI_COMM_WORLD);
  expect_sums(world);
  std::thread([&] {
    int level = 0;
    MPI_Query_thread(&level);
    if (level <= MPI_THREAD_FUNNELED)
      say("thread", thrown([] { init_process_group(MPI_COMM_WORLD); }));
    else expect_sums(init_process_group(MPI_COMM_WORLD));
  }).join();
}

/// The last rank does not call init_process_group().
void absent() {
  if (rank_in(MPI_COMM_WORLD) == size_of(MPI_COMM_WORLD) - 1) {
    std::this_thread::sleep_for(4s);
    return;
  }
  ProcessGroupOptions options;
  options.timeout = 1s;
  say("absent", thrown([&] { init_process_group(MPI_COMM_WORLD, options); }));
  std::this_thread::sleep_for(3s);
}

/// A rank is killed between collectives.
void killed(ProcessGroupOptions options) {
  options.timeout = 20s;
  std::signal(SIGUSR1, SIG_IGN);  // MPICH's mpirun sends it to the others
  auto world = init_process_group(MPI_COMM_WORLD, options);
  expect_sums(world);
  if (world.rank() == 1) std::raise(SIGKILL);
  const auto text = thrown([&] {
    for (int i = 0; i < 1000; ++i) {
      world.barrier();
      std::this_thread::sleep_for(1ms);
    }
  });
  say("killed", text);
  std::_Exit(3);  // MPI_Finalize would wait for the rank
}

/// A message of more than 2^31 bytes.
void large() {
  auto world = init_process_group(MPI_COMM_WORLD, over_mpi());
  constexpr int64_t kBytes = int64_t{3} << 30;
  auto tensor = at::full({kBytes}, world.rank() == 0 ? 7 : 0, at::kByte);
  if (world.rank() == 0) tensor[kBytes - 1].fill_(9);
  world.broadcast(tensor, 0);
  expect(tensor[kBytes - 1].item<int>() == 9 && tensor[kBytes - 2].item<int>() == 7, "its end");
  constexpr int64_t kPart = int64_t{1} << 26;  // a comparison takes as many bytes again
  for (int64_t first = 0; first < kBytes - kPart; first += kPart)
    expect(tensor.narrow(0, first, kPart).eq(7).all().item<bool>(), "its bytes");
}

/// The same all-reduce over TCP and over MPI: equal bits, and as many bytes.
void compare() {
  std::vector<at::Tensor> results;
  std::vector<uint64_t> bytes;
  std::ostringstream times;
  for (const auto& options : {ProcessGroupOptions(), over_mpi()}) {
    auto world = init_process_group(MPI_COMM_WORLD, options);
    torch::manual_seed(world.rank());
    const auto values = at::randn({16 << 20});
    std::vector<double> took;
    for (int i = 0; i < 5; ++i) {
      auto sum = values.clone();
      world.barrier();
      const auto begin = Clock::now();
      world.all_reduce(sum);
      took.push_back(std::chrono::duration<double, std::milli>(Clock::now() - begin).count());
      if (i == 0) results.push_back(sum);
    }
    std::sort(took.begin(), took.end());
    times << ' ' << world.backend_name() << ' ' << took[2];
    bytes.push_back(world.stats().payload_sent());
  }
  expect(at::equal(results[0], results[1]), "equal bits");
  expect(bytes[0] == bytes[1], "equal bytes");
  if (rank_in(MPI_COMM_WORLD) == 0) say("64 MiB ms", times.str());
}

/// The program ends without the end of its group.
void exits() {
  static auto world = init_process_group(MPI_COMM_WORLD, over_mpi());
  expect_sums(world);
  std::exit(0);
}

/// What a group may not change in a process.
struct Process {
  size_t threads = 0;
  std::vector<std::string> signals, environment;
  c10::Allocator* allocator = nullptr;
  bool maps_large_blocks = false;
  int rounding_threads = 0;
  bool operator==(const Process&) const = default;
};

Process process_now() {
  Process now;
  auto* const folder = opendir("/proc/self/task");
  while (const auto* entry = readdir(folder)) now.threads += entry->d_name[0] != '.';
  closedir(folder);
  for (int number = 1; number < 65; ++number) {
    struct sigaction action {};
    sigaction(number, nullptr, &action);
    now.signals.push_back(std::to_string(reinterpret_cast<uintptr_t>(action.sa_handler)));
  }
  for (char** at = environ; *at; ++at) now.environment.push_back(*at);
  now.allocator = c10::GetAllocator(at::kCPU);
  // glibc: a block of 64 MiB has a mapping of its own, unless mallopt() has changed that.
  const auto before = mallinfo2().hblks;
  void* volatile block = std::malloc(64 << 20);
  now.maps_large_blocks = mallinfo2().hblks > before;
  std::free(block);
  now.rounding_threads = at::get_num_threads();
  return now;
}

/// Of this process, in KiB, without what malloc keeps of the freed tensors of the test.
int64_t resident() {
  malloc_trim(0);
  std::ifstream file("/proc/self/statm");
  int64_t all = 0, held = 0;
  file >> all >> held;
  return held * sysconf(_SC_PAGESIZE) / 1024;
}

/// Nothing of the process is changed while a group lives, nor after it. `options`: those for which
/// that is expected.
void effects(const ProcessGroupOptions& options) {
  expect_sums(init_process_group(MPI_COMM_WORLD, options));  // what is loaded once
  const auto before = process_now();
  const auto memory = resident();
  expect(before.maps_large_blocks == !options.tune_process, "malloc's settings");
  for (int i = 0; i < 20; ++i) {
    auto world = init_process_group(MPI_COMM_WORLD, options);
    expect_sums(world);
    const auto during = process_now();
    expect(during.threads == before.threads, "threads while the group lives");
    expect(during == before, "the process while the group lives");
  }
  expect(process_now() == before, "the process after the group");
  const auto grown = resident() - memory;
  expect(grown < 4096, "memory: " + std::to_string(grown) + " KiB more");
}

/// The group outlives MPI.
void outlives(const ProcessGroupOptions& options) {
  static auto world = init_process_group(MPI_COMM_WORLD, options);
  expect_sums(world);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
  say("after MPI_Finalize", thrown([] { expect_sums(world); }));
  say("again", thrown([] { init_process_group(MPI_COMM_WORLD); }));
  world = ProcessGroup();
}

const std::map<std::string, std::function<void()>>& cases() {
  static const std::map<std::string, std::function<void()>> all{
      {"start", start},
      {"communicators", [] { communicators({}); }},
      {"communicators_mpi", [] { communicators(over_mpi()); }},
      {"wrappers", [] { wrappers({}); }},
      {"wrappers_mpi", [] { wrappers(over_mpi()); }},
      {"worlds", [] { worlds(1, {}); }},
      {"worlds_mpi", [] { worlds(2, over_mpi()); }},
      {"refused", refused},
      {"absent", absent},
      {"killed", [] { killed({}); }},
      {"killed_mpi", [] { killed(over_mpi()); }},
      {"large", large},
      {"compare", compare},
      {"exits", exits},
      {"effects", [] { effects({}); }},
      {"tuned", [] { effects({.tune_process = true}); }},
      {"outlives", [] { outlives({}); }},
      {"outlives_mpi", [] { outlives(over_mpi()); }}};
  return all;
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string level = argc > 1 ? argv[1] : "", names = argc > 2 ? argv[2] : "";
  const std::map<std::string, int> levels{{"single", MPI_THREAD_SINGLE},
                                          {"funneled", MPI_THREAD_FUNNELED},
                                          {"serialized", MPI_THREAD_SERIALIZED},
                                          {"multiple", MPI_THREAD_MULTIPLE}};
  if (names == "start") say("before MPI_Init", thrown([] { init_process_group(MPI_COMM_WORLD); }));
  int provided = 0, ended = 0;
  MPI_Init_thread(&argc, &argv, levels.at(level), &provided);
  std::istringstream list(names);
  for (std::string name; std::getline(list, name, ',');) cases().at(name)();
  MPI_Finalized(&ended);
  if (!ended) MPI_Finalize();
  return 0;
} catch (const std::exception& error) {
  say("failed", error.what());
  std::_Exit(1);
}
