#include <atomic>
#include <fstream>
#include <set>

#include <gmock/gmock.h>
#include <sys/resource.h>

#include "comm/shm/shm_segment.h"
#include "shm_worlds.h"
#include "tessera/error.h"

namespace {

using namespace tessera::testing;
using namespace std::chrono_literals;
using tessera::BrokenWorldError;
using tessera::UsageError;
using tessera::comm::make_shm_transport;
using tessera::comm::ShmSegment;
using tessera::comm::Transport;
using ::testing::HasSubstr;

/// Reduces until BrokenWorldError, which must blame `blamed`.
void reduce_until_broken(Transport& transport, const std::vector<int>& blamed, bool shared,
                         const std::string& words) {
  auto tensor = shared ? transport.allocate(300000, at::kFloat, false) : at::ones({300000});
  try {
    while (true) transport.all_reduce(tensor, 1);
  } catch (const BrokenWorldError& error) {
    EXPECT_EQ(error.ranks(), blamed) << error.what();
    EXPECT_THAT(error.what(), HasSubstr("all_reduce of 300000 Float"));
    EXPECT_THAT(error.what(), HasSubstr(words));
    EXPECT_THROW(transport.exchange({}), BrokenWorldError) << "unusable from now on";
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}

std::set<std::string> entries_of(const char* folder) {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.insert(entry.path().filename());
  return names;
}

int open_memory_files() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code ignored;
    const auto target = std::filesystem::read_symlink(entry.path(), ignored).string();
    count += target.find("memfd:tessera") != std::string::npos;
  }
  return count;
}

TEST(ShmFaults, AKilledRankIsNamedWithinTwoSecondsAndNothingIsLeft) {
  const auto before = entries_of("/dev/shm");
  for (const bool shared : {false, true}) {
    Processes ranks(3, [&](Transport& transport, int rank) {
      reduce_until_broken(transport, {1}, shared, "rank 1 has died");
    });
    std::this_thread::sleep_for(500ms);
    ranks.signal(1, SIGKILL);
    const auto killed = Clock::now();
    EXPECT_EQ(ranks.wait(0), 0);
    EXPECT_EQ(ranks.wait(2), 0);
    EXPECT_LT(Clock::now() - killed, 2s);
    EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
  }
  EXPECT_EQ(entries_of("/dev/shm"), before);
}

TEST(ShmFaults, AStoppedRankIsNamedAtTheTimeOut) {
  Processes ranks(
      3,
      [&](Transport& transport, int rank) {
        reduce_until_broken(transport, {2}, true, "did not arrive");
      },
      1s);
  std::this_thread::sleep_for(500ms);
  ranks.signal(2, SIGSTOP);
  const auto stopped = Clock::now();
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
  EXPECT_GE(Clock::now() - stopped, 900ms);
  EXPECT_LT(Clock::now() - stopped, 3s);
}

TEST(ShmFaults, AStoppedRankIsGivenUpBeforeALongTimeOut) {
  Processes ranks(
      3,
      [&](Transport& transport, int rank) {
        transport.set_stopped_timeout(1s);
        reduce_until_broken(transport, {2}, true, "has been stopped for 1000 ms");
      },
      60s);
  std::this_thread::sleep_for(500ms);
  for (int pause = 0; pause < 3; ++pause) {
    ranks.signal(2, SIGSTOP);
    std::this_thread::sleep_for(600ms);
    ranks.signal(2, SIGCONT);
    std::this_thread::sleep_for(300ms);
  }
  ranks.signal(2, SIGSTOP);
  const auto stopped = Clock::now();
  EXPECT_EQ(ranks.wait(0), 0);
  EXPECT_EQ(ranks.wait(1), 0);
  EXPECT_GE(Clock::now() - stopped, 900ms);
  EXPECT_LT(Clock::now() - stopped, 5s);
}

TEST(ShmFaults, AStoppedRankThatContinuesAfterTheOthersHaveEndedNamesItself) {
  for (const int stopped : {0, 2}) {
    Processes ranks(
        3,
        [&](Transport& transport, int rank) {
          reduce_until_broken(transport, {stopped}, true,
                              rank == stopped ? "gave up on it earlier" : "did not arrive");
        },
        1s);
    std::this_thread::sleep_for(500ms);
    ranks.signal(stopped, SIGSTOP);
    for (int rank = 0; rank < 3; ++rank)
      if (rank != stopped) EXPECT_EQ(ranks.wait(rank), 0);
    ranks.signal(stopped, SIGCONT);
    EXPECT_EQ(ranks.wait(stopped, 10s), 0);
  }
}

TEST(ShmFaults, ARankThatLeavesIsNamedByThoseThatNeedIt) {
  std::atomic<int> named{0};
  const auto errors = run_threads(4, [&](Transport& transport, int rank) {
    transport.exchange({});
    if (rank == 3) throw std::runtime_error("its own trouble");
    try {
      while (true) transport.exchange({});
    } catch (const BrokenWorldError& error) {
      EXPECT_EQ(error.ranks(), std::vector<int>{3}) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("rank 3 has left"));
      ++named;
      throw;
    }
  });
  EXPECT_EQ(named, 3);
  EXPECT_EQ(message_of(errors[3]), "its own trouble");
}

TEST(ShmFaults, LeavingAfterTheLastCollectiveAffectsNoRank) {
  for (int i = 0; i < 20; ++i) {
    const auto errors = run_threads(3, [&](Transport& transport, int rank) {
      auto tensor = at::ones({100000});
      transport.all_reduce(tensor, 1);
      if (rank == i % 3) return;
      std::this_thread::sleep_for(2ms);
      EXPECT_EQ(tensor[99999].item<float>(), 3);
    });
    for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  }
}

TEST(ShmFaults, AnErrorInConsumeIsBlamedOnItsRank) {
  const auto errors = run_threads(2, [&](Transport& transport, int rank) {
    const Transport::ConsumeRun consume = [&](int64_t, const at::Tensor&) {
      if (rank == 0) throw std::runtime_error("consumer's trouble");
    };
    auto flat = transport.allocate(1000, at::kFloat, false);
    transport.reduce_scatter(flat, {500, 500}, {1, &consume});
  });
  EXPECT_EQ(message_of(errors[0]), "consumer's trouble");
  EXPECT_THAT(message_of(errors[1]), HasSubstr("rank 0 has left"));
}

TEST(ShmFaults, AbortEndsABlockedCall) {
  std::atomic<Transport*> blocked{nullptr};
  std::atomic<bool> abort_is_over{false};
  const auto errors = run_threads(2, [&](Transport& transport, int rank) {
    if (rank == 0) {
      blocked = &transport;
      try {
        transport.exchange({});
      } catch (...) {
        while (!abort_is_over) std::this_thread::sleep_for(1ms);  // the transport is still in use
        throw;
      }
      return;
    }
    while (blocked == nullptr) std::this_thread::sleep_for(1ms);
    std::this_thread::sleep_for(20ms);
    blocked.load()->abort();
    abort_is_over = true;
    std::this_thread::sleep_for(300ms);
  });
  EXPECT_THAT(message_of(errors[0]), HasSubstr("shut down on this rank"));
}

TEST(ShmFaults, AMissingRankIsNamedAtStartUp) {
  std::string reason;
  try {
    make_shm_transport(world_of(0, 2, c10::make_intrusive<c10d::HashStore>(), 200ms), reason);
    ADD_FAILURE();
  } catch (const BrokenWorldError& error) {
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
    EXPECT_THAT(error.what(), HasSubstr("rank 1 did not arrive"));
  }
}

TEST(ShmFaults, IfOneRankSwitchesItOffAllFallBack) {
  char name[] = "/tmp/tessera-shm-test-XXXXXX";
  const std::string folder = mkdtemp(name);
  const auto refused = [&](int rank) {
    if (rank == 1) setenv("TESSERA_SHM", "0", 1);
    std::string reason;
    auto store = c10::make_intrusive<c10d::FileStore>(folder + "/store", 2);
    auto transport = make_shm_transport(world_of(rank, 2, store, 10s), reason);
    return !transport && reason.find("rank 1") != std::string::npos &&
           reason.find("TESSERA_SHM is 0") != std::string::npos;
  };
  const pid_t child = fork();
  if (child == 0) _exit(refused(1) ? 0 : 1);
  EXPECT_TRUE(refused(0));
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  std::filesystem::remove_all(folder);
}

TEST(ShmFaults, FailedAllocationOnOneRankIsAnErrorOnAllThatNamesIt) {
  Processes ranks(3, [](Transport& transport, int rank) {
    const auto fails = [&](int64_t numel, const std::string& words) {
      try {
        transport.allocate(numel, at::kFloat, false);
        ADD_FAILURE() << words;
      } catch (const UsageError& error) {
        EXPECT_THAT(error.what(), HasSubstr(words));
      }
    };
    if (rank == 1) {
      const rlimit small{1 << 20, 1 << 20};
      setrlimit(RLIMIT_FSIZE, &small);
    }
    fails(1 << 20,
          "rank 1 failed: the limit of file sizes (ulimit -f) is 1 MiB, but shared memory needs "
          "5 MiB");
    fails(int64_t{1} << 45, "failed: ");
    auto tensor = transport.allocate(1000, at::kFloat, false);
    tensor.fill_(1);
    transport.all_reduce(tensor, 1);
    EXPECT_EQ(tensor[7].item<float>(), 3) << "as before the failed calls";
    EXPECT_EQ(open_memory_files(), 0) << "no other process can map it";
  });
  ranks.expect_all_succeed();
}

TEST(ShmFaults, AProcessWithTheSamePidIsNotMistakenForThePeer) {
  const auto mine = ShmSegment::create(4096, 1);
  auto card = mine->card();
  EXPECT_EQ(ShmSegment::open(card), mine) << "mapped once in a process";
  card.nonce ^= 1;
  EXPECT_THROW(ShmSegment::open(card), std::runtime_error);
  card = mine->card();
  card.fd = 0;
  card.nonce ^= 1;
  EXPECT_THROW(ShmSegment::open(card), std::runtime_error);
  card.pid = 1 << 30;
  EXPECT_THROW(ShmSegment::open(card), std::runtime_error);
}

TEST(ShmFaults, LivenessDetectsEndedProcessesAndReusedPids) {
  auto self = tessera::comm::this_process();
  EXPECT_TRUE(is_alive(self));
  self.start_time += 1;
  EXPECT_FALSE(is_alive(self));
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  kill(child, SIGSTOP);
  std::ifstream stat("/proc/" + std::to_string(child) + "/stat");
  std::string word;
  for (int i = 0; i < 22; ++i) stat >> word;
  const tessera::comm::ProcessIdentity identity{child, std::stoull(word)};
  EXPECT_TRUE(is_alive(identity)) << "stopped is not ended";
  kill(child, SIGKILL);
  for (int i = 0; i < 1000 && is_alive(identity); ++i) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(is_alive(identity)) << "a zombie has ended";
  waitpid(child, nullptr, 0);
  EXPECT_FALSE(is_alive(identity));
}

}  // namespace
