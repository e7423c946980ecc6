#include "launch/supervise/memory_watch.h"

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/launched.h"

namespace tessera::launch {
namespace {

class MemoryWatchTest : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& text) {
    const auto whole = std::filesystem::path(folder_.path()) / path;
    std::filesystem::create_directories(whole.parent_path());
    std::ofstream(whole) << text;
  }
  MemoryWatch watch() const {
    const std::string& base = folder_.path();
    return MemoryWatch(base + "/cgroup", base + "/own", base + "/vmstat");
  }
  launch_test::TemporaryFolder folder_;
};

Exit killed(int signal) {
  Exit exit;
  exit.signal = signal;
  return exit;
}

constexpr MemoryUse kUse{int64_t{47} << 20, std::nullopt};

TEST_F(MemoryWatchTest, AKillForMemoryInVersion2) {
  write("own", "0::/job/step\n");
  write("cgroup/job/memory.max", "104857600\n");
  write("cgroup/job/step/memory.max", "max\n");
  write("cgroup/job/step/memory.events", "low 0\noom 5\noom_kill 2\noom_group_kill 0\n");
  const auto memory = watch();
  EXPECT_EQ(memory.explain(killed(SIGKILL), {}, kUse), "") << "killed by somebody else";
  write("cgroup/job/step/memory.events", "low 0\noom 6\noom_kill 3\noom_group_kill 0\n");
  EXPECT_EQ(memory.explain(killed(SIGKILL), {}, kUse),
            "by the kernel for memory (cgroup limit 100 MiB; its peak 47 MiB)");
  EXPECT_EQ(memory.explain(killed(SIGSEGV), {}, kUse), "");
  auto by_launcher = killed(SIGKILL);
  by_launcher.by_launcher = true;
  EXPECT_EQ(memory.explain(by_launcher, {}, kUse), "");
}

TEST_F(MemoryWatchTest, AKillForMemoryInVersion1) {
  write("own", "9:cpu,memory:/job\n0::/\n");
  write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("cgroup/memory/job/memory.limit_in_bytes", "50331648\n");
  write("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n");
  const auto memory = watch();
  write("cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n");
  EXPECT_EQ(memory.explain(killed(SIGKILL), {}, kUse),
            "by the kernel for memory (cgroup limit 48 MiB; its peak 47 MiB)");
}

TEST_F(MemoryWatchTest, AContainerSeesItsOwnGroupAsTheTopmost) {
  write("own", "0::/docker/0123\n");
  write("cgroup/memory.max", "52428800\n");
  write("cgroup/memory.events", "oom_kill 0\n");
  const auto memory = watch();
  write("cgroup/memory.events", "oom_kill 1\n");
  EXPECT_EQ(memory.kills(), 1);
  EXPECT_EQ(memory.limit(), int64_t{50} << 20);
}

TEST_F(MemoryWatchTest, WithoutAControlGroupTheHostIsAsked) {
  write("vmstat", "nr_free_pages 7\noom_kill 4\n");
  const auto memory = watch();
  write("vmstat", "nr_free_pages 7\noom_kill 5\n");
  EXPECT_EQ(memory.explain(killed(SIGKILL), {}, kUse),
            "by the kernel for memory (no cgroup limit; its peak 47 MiB)");
}

TEST_F(MemoryWatchTest, NoInformationIsNoError) {
  const auto memory = watch();
  EXPECT_EQ(memory.explain(killed(SIGKILL), {}, kUse), "");
  EXPECT_FALSE(memory.limit());
}

TEST_F(MemoryWatchTest, AnErrorOfAnAllocationNamesTheLimit) {
  const auto memory = watch();
  const MemoryUse limited{int64_t{47} << 20, int64_t{300} << 20};
  Exit exit;
  exit.code = 1;
  EXPECT_EQ(memory.explain(exit, {"  what():  std::bad_alloc"}, limited),
            "out of memory (RLIMIT_AS 300 MiB; its peak 47 MiB)");
  EXPECT_EQ(memory.explain(killed(SIGABRT), {"DefaultCPUAllocator: can't allocate memory"}, kUse),
            "out of memory (no RLIMIT_AS; its peak 47 MiB)");
  EXPECT_EQ(memory.explain(exit, {"another error"}, limited), "");
}

}  // namespace
}  // namespace tessera::launch
