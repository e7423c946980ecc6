#include "harness/sim/rank_processes.h"

#include <array>
#include <stdexcept>

#include <fmt/format.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <unistd.h>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "harness/sim/device_backend.h"
#include "harness/sim/sim.h"
#include "harness/temporary_folder.h"

namespace tessera::sim {
namespace {

constexpr unsigned kSecondsOfARank = 60;
constexpr int kMaxDelayUs = 150;

struct Child {
  pid_t pid = 0;
  int pipe = -1;
};

[[noreturn]] void run_rank(Groups groups, uint64_t seed, int pipe,
                           const std::function<void(Groups&)>& body) {
  ::alarm(kSecondsOfARank);
  ::dup2(pipe, STDERR_FILENO);  // the text of a host access too
  int status = 0;
  try {
    at::set_num_threads(1);
    init(seed * 8 + groups.rank(), kMaxDelayUs);
    body(groups);
    synchronize();
  } catch (const std::exception& error) {
    const std::string text = std::string("threw: ") + error.what();
    [[maybe_unused]] const auto written = ::write(pipe, text.data(), text.size());
    status = 1;
  }
  ::_exit(status);
}

std::string read_all(int pipe) {
  std::string text;
  std::array<char, 4096> buffer;
  for (ssize_t got; (got = ::read(pipe, buffer.data(), buffer.size())) > 0;)
    text.append(buffer.data(), got);
  ::close(pipe);
  return text;
}

}  // namespace

ProcessGroup Groups::cpu(ProcessGroupOptions options) { return make(false, options); }
ProcessGroup Groups::device(ProcessGroupOptions options) { return make(true, options); }
ProcessGroup Groups::staged(ProcessGroupOptions options) {
  options.staged_device = kType;
  return make(false, options);
}

ProcessGroup Groups::make(bool with_backend, ProcessGroupOptions options) {
  const auto file = fmt::format("{}/store{}", folder_, made_++);
  if (world_ == 1) return ProcessGroup();
  options.timeout = std::chrono::seconds(20);
  auto world = comm::World::start(rank_, world_, options);
  world.store = c10::make_intrusive<c10d::FileStore>(file, world_);
  if (with_backend) world.device = device_backend();
  auto transport = comm::make_transport(world);
  return ProcessGroup(std::make_shared<ProcessGroup::Impl>(std::move(world), std::move(transport)));
}

std::vector<std::string> run_processes(int world, uint64_t seed,
                                       const std::function<void(Groups&)>& body) {
  const testing::TemporaryFolder folder;
  std::vector<Child> children(world);
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("sim: no pipe");
    children[rank] = {::fork(), ends[0]};
    if (children[rank].pid == 0) run_rank(Groups(rank, world, folder.path()), seed, ends[1], body);
    ::close(ends[1]);
  }
  std::vector<std::string> errors;
  for (const auto& child : children) {
    auto text = read_all(child.pipe);
    int status = 0;
    ::waitpid(child.pid, &status, 0);
    if (WIFSIGNALED(status)) text += fmt::format("ended by signal {}", WTERMSIG(status));
    const bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    errors.push_back(good ? "" : text);
  }
  return errors;
}

void expect(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error("expected: " + text);
}

}  // namespace tessera::sim
