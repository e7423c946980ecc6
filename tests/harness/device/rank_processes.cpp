#include "harness/device/rank_processes.h"

#include <array>
#include <csignal>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <unistd.h>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "harness/device/device.h"
#include "harness/temporary_folder.h"

namespace tessera::on_device {
namespace {

struct Child {
  pid_t pid = 0;
  int pipe = -1;
};

[[noreturn]] void run_rank(Groups groups, int world, uint64_t seed, int pipe,
                           const std::function<void(Groups&)>& body) {
  ::alarm(seconds_of_a_rank());
  ::dup2(pipe, STDERR_FILENO);  // the text of a host access too
  int status = 0;
  try {
    at::set_num_threads(1);
    start_rank(groups.rank(), world, seed);
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

ProcessGroup Groups::cpu(ProcessGroupOptions options) {
  options.deterministic |= has_kernels_of_cpu();  // for a group that is made of it
  return make(nullptr, options);
}
ProcessGroup Groups::device(ProcessGroupOptions options) {
  options.deterministic |= has_kernels_of_cpu();
  return native(options);
}
ProcessGroup Groups::native(ProcessGroupOptions options) {
  return make(world_ > 1 ? backend(false) : nullptr, options);
}
ProcessGroup Groups::staged(ProcessGroupOptions options) {
  options.staged_device = type();
  return make(nullptr, options);
}

ProcessGroup Groups::make(std::shared_ptr<const comm::DeviceBackend> backend,
                          ProcessGroupOptions options) {
  const auto file = fmt::format("{}/store{}", folder_, made_++);
  if (world_ == 1) return ProcessGroup();
  if (options.timeout == ProcessGroupOptions().timeout) options.timeout = std::chrono::seconds(20);
  auto world = comm::World::start(rank_, world_, options);
  world.store = c10::make_intrusive<c10d::FileStore>(file, world_);
  world.device = std::move(backend);
  auto transport = comm::make_transport(world);
  return ProcessGroup(std::make_shared<ProcessGroup::Impl>(std::move(world), std::move(transport)));
}

std::vector<std::string> run_processes(int world, uint64_t seed,
                                       const std::function<void(Groups&)>& body) {
  const testing::TemporaryFolder folder;
  std::vector<Child> children(world);
  for (int rank = 0; rank < world; ++rank) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("run_processes: no pipe");
    children[rank] = {::fork(), ends[0]};
    if (children[rank].pid == 0)
      run_rank(Groups(rank, world, folder.path()), world, seed, ends[1], body);
    ::close(ends[1]);
  }
  std::vector<std::string> errors;
  for (auto& child : children) {
    auto text = read_all(child.pipe);
    int status = 0;
    ::waitpid(std::exchange(child.pid, 0), &status, 0);
    if (WIFSIGNALED(status)) text += fmt::format("ended by signal {}", WTERMSIG(status));
    // A rank that this one has stopped goes on, and ends at the latest when its alarm rings.
    for (const auto& other : children)
      if (other.pid != 0) ::kill(other.pid, SIGCONT);
    const bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    errors.push_back(good ? "" : text);
  }
  return errors;
}

void expect(bool condition, const std::string& text) {
  if (!condition) throw std::runtime_error("expected: " + text);
}

}  // namespace tessera::on_device
