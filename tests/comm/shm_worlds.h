#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include "comm/shm/shm_setup.h"

namespace tessera::testing {

using Clock = std::chrono::steady_clock;

inline comm::World world_of(int rank, int size, c10::intrusive_ptr<c10d::Store> store,
                            std::chrono::milliseconds timeout) {
  ProcessGroupOptions options;
  options.timeout = timeout;
  auto world = comm::World::start(rank, size, options);
  world.store = std::move(store);
  return world;
}

using TransportBody = std::function<void(comm::Transport& transport, int rank)>;

inline std::unique_ptr<comm::Transport> shm_or_throw(const comm::World& world) {
  std::string reason;
  auto transport = comm::make_shm_transport(world, reason);
  if (!transport) throw std::runtime_error("no shared memory: " + reason);
  return transport;
}

/// Runs ranks as threads of this process. Returns what each threw (null: nothing).
inline std::vector<std::exception_ptr> run_threads(
    int size, const TransportBody& body,
    std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        auto transport = shm_or_throw(world_of(rank, size, store, timeout));
        body(*transport, rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// Ranks as forked processes. A rank's exit code is 0, or 1 after a failed expectation or an
/// exception.
class Processes {
 public:
  Processes(int size, const TransportBody& body,
            std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
    char name[] = "/tmp/tessera-shm-test-XXXXXX";
    folder_ = mkdtemp(name);
    std::fflush(nullptr);
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) run_child(rank, size, body, timeout);
      pids_.push_back(pid);
    }
    codes_.assign(size, -1);
  }
  ~Processes() {
    for (size_t r = 0; r < pids_.size(); ++r) {
      if (codes_[r] >= 0) continue;
      kill(pids_[r], SIGKILL);
      waitpid(pids_[r], nullptr, 0);
    }
    std::filesystem::remove_all(folder_);
  }

  void signal(int rank, int number) { kill(pids_[rank], number); }
  /// The exit code, 128 + signal if killed, or -1 if the rank did not end in time.
  int wait(int rank, std::chrono::milliseconds at_most = std::chrono::seconds(60)) {
    const auto end = Clock::now() + at_most;
    while (codes_[rank] < 0 && Clock::now() < end) {
      int status = 0;
      if (waitpid(pids_[rank], &status, WNOHANG) == pids_[rank])
        codes_[rank] = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      else std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return codes_[rank];
  }
  void expect_all_succeed() {
    for (size_t r = 0; r < pids_.size(); ++r)
      EXPECT_EQ(wait(static_cast<int>(r)), 0) << "rank " << r;
  }

 private:
  [[noreturn]] void run_child(int rank, int size, const TransportBody& body,
                              std::chrono::milliseconds timeout) {
    int code = 1;
    try {
      at::set_num_threads(1);
      auto store = c10::make_intrusive<c10d::FileStore>(folder_ + "/store", size);
      auto transport = shm_or_throw(world_of(rank, size, store, timeout));
      body(*transport, rank);
      code = ::testing::Test::HasFailure() ? 1 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    std::fflush(nullptr);
    _exit(code);
  }

  std::string folder_;
  std::vector<pid_t> pids_;
  std::vector<int> codes_;
};

}  // namespace tessera::testing
