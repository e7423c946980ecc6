#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "launch/launched.h"

namespace tessera::launch_test {
namespace {

/// A pseudo terminal with 77 columns. The launcher runs on its slave.
class Terminal {
 public:
  Terminal() {
    winsize size{24, 77, 0, 0};
    if (openpty(&master_, &slave_, nullptr, nullptr, &size) != 0)
      throw std::runtime_error("no pseudo terminal");
  }
  ~Terminal() {
    close(master_);
    close(slave_);
  }
  int slave() const { return slave_; }
  int master() const { return master_; }
  const std::string& text() const { return text_; }
  void type(const std::string& keys) const { (void)!write(master_, keys.data(), keys.size()); }

  bool shows(const std::string& expected, int times = 1) {
    while (occurrences(text_, expected) < times) {
      pollfd polled{master_, POLLIN, 0};
      char buffer[4096];
      if (poll(&polled, 1, 10000) != 1) return false;
      const ssize_t got = read(master_, buffer, sizeof buffer);
      if (got <= 0) return false;
      text_.append(buffer, got);
    }
    return true;
  }

 private:
  int master_, slave_;
  std::string text_;
};

/// The foreground process group of a terminal, queried from outside its session.
pid_t foreground(int master) {
  pid_t group = -1;
  ioctl(master, TIOCGPGRP, &group);
  return group;
}

/// The letter of /proc/<pid>/stat: R, S, T (stopped), Z …
char state(pid_t pid) {
  const std::string text = read_file("/proc/" + std::to_string(pid) + "/stat");
  const size_t close = text.rfind(')');
  return close == std::string::npos ? '?' : text[close + 2];
}

bool reaches_state(pid_t pid, bool stopped) {
  for (int i = 0; i < 1000; ++i) {
    if ((state(pid) == 'T') == stopped) return true;
    usleep(5000);
  }
  return false;
}

TEST(OnATerminal, RankZeroKnowsTheTerminalAndCtrlCReachesEachRankOnce) {
  Terminal terminal;
  Launched run(run_shell(2,
                         "trap 'echo got-int; exit 0' INT; echo tty=$TESSERA_TTY,cols=$COLUMNS,; "
                         "while :; do sleep 0.05; done"),
               {}, {.terminal = terminal.slave()});
  ASSERT_TRUE(terminal.shows("tty=1,cols=77,")) << terminal.text();
  ASSERT_TRUE(terminal.shows("tty=,")) << terminal.text();
  terminal.type("\x03");
  ASSERT_TRUE(terminal.shows("got-int", 2)) << terminal.text();
  EXPECT_EQ(run.finish(), 0);
}

TEST(OnATerminal, RankZeroCanReadIt) {
  Terminal terminal;
  Launched run(run_shell(2, "if read line; then echo got=$line; fi"), {},
               {.terminal = terminal.slave()});
  ASSERT_TRUE(terminal.shows("OMP_NUM_THREADS"));
  terminal.type("hello\n");
  EXPECT_TRUE(terminal.shows("got=hello")) << terminal.text();
  EXPECT_EQ(run.finish(), 0);
}

TEST(OnATerminal, CtrlZStopsAllAndContinueContinuesAll) {
  Terminal terminal;
  // The shell execs sleep, because a shell stopped inside vfork has state waiting, not stopped.
  Launched run(run_shell(2, "echo pid=$$; exec sleep 60"), {}, {.terminal = terminal.slave()});
  ASSERT_TRUE(terminal.shows("pid=", 2));
  std::vector<pid_t> pids = {run.pid()};
  for (size_t at = 0; (at = terminal.text().find("pid=", at)) != std::string::npos; ++at)
    pids.push_back(std::atoi(terminal.text().c_str() + at + 4));
  terminal.type("\x1a");
  for (pid_t pid : pids) EXPECT_TRUE(reaches_state(pid, true)) << state(pid);
  run.send(SIGCONT);
  for (pid_t pid : pids) EXPECT_TRUE(reaches_state(pid, false)) << state(pid);
  run.send(SIGINT);
  EXPECT_EQ(run.finish(), 130);
}

TEST(OnATerminal, CtrlCWhileRankZeroReadsEndsAllRanks) {
  Terminal terminal;
  Launched run(run_shell(2, "echo ready; if [ $RANK = 0 ]; then read line; fi; exec sleep 60"), {},
               {.terminal = terminal.slave()});
  ASSERT_TRUE(terminal.shows("ready", 2));
  // Ctrl-C goes to the launcher until rank 0's read has brought rank 0 to the foreground.
  for (int i = 0; i < 1000 && foreground(terminal.master()) == run.pid(); ++i) usleep(5000);
  terminal.type("\x03");
  ASSERT_TRUE(terminal.shows("SIGINT: forwarded to 1 rank")) << terminal.text();
  EXPECT_EQ(run.finish(), 130);
}

}  // namespace
}  // namespace tessera::launch_test
