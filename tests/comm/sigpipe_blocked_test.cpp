#include "comm/base/sigpipe_blocked.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "harness/ranks.h"
#include "tessera/detail/c10d.h"
#if TESSERA_TORCH_AT_LEAST(2, 0)
#include <torch/csrc/distributed/c10d/Backend.hpp>
#endif

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <system_error>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace {

using tessera::comm::SigpipeBlocked;
using ::testing::HasSubstr;

/// Writes to a pipe without a reader and returns errno. Without a block the process would end here.
int write_without_reader() {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  ::close(ends[0]);
  const auto written = ::write(ends[1], "x", 1);
  const int error = written == 1 ? 0 : errno;
  ::close(ends[1]);
  return error;
}

bool blocked_here() {
  sigset_t mask;
  pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  return sigismember(&mask, SIGPIPE);
}

/// The threads of this process, and whether each blocks SIGPIPE.
std::map<std::string, bool> threads() {
  std::map<std::string, bool> blocks;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("SigBlk:"))
        blocks[task.path().filename()] =
            std::stoull(line.substr(7), nullptr, 16) >> (SIGPIPE - 1) & 1;
    }
  }
  return blocks;
}

/// A backend whose peer has just died: send and recv write to a closed pipe.
class DeadPeer : public tessera::compat::C10dBackend {
 public:
  DeadPeer() : tessera::compat::C10dBackend(0, 2) {}
  const std::string getBackendName() const override { return "dead"; }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>&, int, int) override { broken(); }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>&, int, int) override { broken(); }

 private:
  [[noreturn]] static void broken() {
    throw std::system_error(write_without_reader(), std::generic_category(), "write");
  }
};

TEST(Sigpipe, AWriteFailsWithoutAPendingSignal) {
  ASSERT_FALSE(blocked_here());
  {
    const SigpipeBlocked outer;
    const SigpipeBlocked inner;
    EXPECT_EQ(write_without_reader(), EPIPE);
  }
  EXPECT_FALSE(blocked_here());  // had the signal been left pending, it would have come now
}

TEST(Sigpipe, ABlockOfTheCallerIsKept) {
  sigset_t set, former;
  sigemptyset(&set);
  sigaddset(&set, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &set, &former);
  { const SigpipeBlocked block; }
  EXPECT_TRUE(blocked_here());
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
}

TEST(Sigpipe, APeerThatDiesDuringAWriteIsAnErrorThatNamesIt) {
  auto group = tessera::from_c10d(c10::make_intrusive<DeadPeer>());
  try {
    group.barrier();
    FAIL() << "expected an error";
  } catch (const tessera::BrokenWorldError& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
    EXPECT_THAT(error.what(), HasSubstr("Broken pipe"));
  }
  EXPECT_FALSE(blocked_here());
}

TEST(Sigpipe, GloosThreadsBlockSigpipe) {
  const auto before = threads();
  std::array<std::string, 2> ranks;
  tessera::testing::run_ranks(
      2,
      [&](tessera::ProcessGroup group, int rank) {
        ranks[rank] = std::to_string(::gettid());
        group.barrier();
        EXPECT_FALSE(blocked_here()) << "rank " << rank << " itself";
        if (rank == 0) {
          int of_gloo = 0;
          for (const auto& [id, blocks] : threads()) {
            if (before.contains(id) || std::ranges::find(ranks, id) != ranks.end()) continue;
            ++of_gloo;
            EXPECT_TRUE(blocks) << "thread " << id;
          }
          EXPECT_GE(of_gloo, 2) << "each rank's Gloo has threads";
        }
        group.barrier();
      },
      {.backend = tessera::Backend::Gloo});
}

}  // namespace
