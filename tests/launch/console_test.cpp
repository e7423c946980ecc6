#include <filesystem>
#include <sstream>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include "launch/launched.h"

namespace tessera::launch_test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(ConsoleOutput, RankZerosLinesHaveNoPrefixTheOthersDo) {
  Launched run(run_shell(2, "echo out; echo err >&2"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "out\n"), 2);
  EXPECT_EQ(occurrences(run.out(), "[rank 1] out\n"), 1);
  EXPECT_EQ(occurrences(run.err(), "[rank 1] err\n"), 1);
  EXPECT_EQ(occurrences(run.out(), "err"), 0);
}

TEST(ConsoleOutput, AWorldOfOnePassesEverything) {
  Launched run(run_shell(1, "printf 'a\\rb\\0c'"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), std::string("a\rb\0c", 5));
  EXPECT_EQ(run.err(), "");
}

TEST(ConsoleOutput, LinesStayWhole) {
  // Four ranks write long lines in small parts at the same time.
  const std::string script =
      "i=0; while [ $i -lt 200 ]; do printf '%s' \"begin$RANK\"; printf '%s' "
      "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; "
      "printf '%s\\n' \"end$RANK\"; i=$((i+1)); done";
  Launched run(run_shell(4, script), {}, {.merged = true});
  EXPECT_EQ(run.finish(), 0);
  std::istringstream lines(run.out());
  int count = 0;
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("tessera run:", 0) == 0) continue;
    std::string rank = "0";
    if (line.rfind("[rank ", 0) == 0) {
      rank = line.substr(6, 1);
      line = line.substr(9);
    }
    EXPECT_EQ(line, "begin" + rank + "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxend" + rank);
    ++count;
  }
  EXPECT_EQ(count, 800);
}

TEST(ConsoleOutput, ALineWaitsForTheEndOfRankZerosLine) {
  // Rank 1 writes while rank 0's line is unfinished. A launcher that did not wait would write rank
  // 1's line during the pause.
  Launched run(run_shell(2,
                         "cd $TESSERA_RENDEZVOUS; if [ $RANK = 0 ]; then printf begin; touch half; "
                         "until [ -e other ]; do :; done; "
                         "sleep 0.2; echo -end; else until [ -e half ]; do :; done; sleep 0.1; "
                         "echo line; touch other; fi"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), "begin-end\n[rank 1] line\n");
}

TEST(ConsoleOutput, MuchOutputArrivesInFull) {
  Launched run(run_shell(2, "seq 1 200000"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "\n"), 400000);
  EXPECT_EQ(occurrences(run.out(), "[rank 1] 200000\n"), 1);
}

TEST(ConsoleOutput, AFullDiskLosesOutputButEndsNoRank) {
  const int full = open("/dev/full", O_WRONLY | O_CLOEXEC);
  const std::string script =
      "seq 1 20000; sleep 0.2; echo more; echo done$RANK >&2; [ $RANK = 0 ] || exit $CODE";
  for (int code : {0, 3}) {
    Launched run(run_shell(2, script), {{"CODE", std::to_string(code)}}, {.out = full});
    EXPECT_EQ(run.finish(), code);
    EXPECT_EQ(occurrences(run.err(),
                          "tessera run: stdout: No space left on device; further output of the "
                          "ranks to it is lost"),
              1);
    EXPECT_THAT(run.err(), HasSubstr("done0"));
    EXPECT_THAT(run.err(), HasSubstr("[rank 1] done1"));
  }
  close(full);
}

TEST(ConsoleOutput, RanksEndWhenTheReaderOfTheOutputIsGone) {
  int ends[2];
  ASSERT_EQ(pipe2(ends, O_CLOEXEC), 0);
  close(ends[0]);
  Launched run(run_shell(2, "while :; do echo x; sleep 0.01; done"), {}, {.out = ends[1]});
  close(ends[1]);
  EXPECT_EQ(run.finish(), 128 + SIGPIPE);
  EXPECT_THAT(run.err(), HasSubstr("SIGPIPE"));
}

TEST(ConsoleOutput, ALastLineWithoutNewlineIsKept) {
  Launched run(run_shell(2, "printf tail"));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_THAT(run.out(), HasSubstr("[rank 1] tail"));
  EXPECT_EQ(occurrences(run.out(), "tail"), 2);
}

TEST(LogFiles, ContainEachRanksStreams) {
  const TemporaryFolder logs;
  Launched run(run_shell(2, "echo out$RANK; echo err$RANK >&2", {"--log-dir", logs.path()}));
  EXPECT_EQ(run.finish(), 0);
  for (const std::string rank : {"0", "1"}) {
    EXPECT_EQ(read_file(logs.path() + "/attempt_0/" + rank + "/stdout.log"), "out" + rank + "\n");
    EXPECT_EQ(read_file(logs.path() + "/attempt_0/" + rank + "/stderr.log"), "err" + rank + "\n");
    EXPECT_THAT(run.out(), HasSubstr("out" + rank));
    EXPECT_THAT(run.err(), HasSubstr("err" + rank));
  }
}

TEST(LogFiles, RedirectsKeepTheConsoleFreeAndTeeDoesNot) {
  const TemporaryFolder logs;
  Launched run(run_shell(2, "echo out$RANK; echo err$RANK >&2",
                         {"--log_dir=" + logs.path(), "--redirects=1:3", "--tee", "0:1"}));
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), "out0\n");
  EXPECT_THAT(run.err(), HasSubstr("err0\n"));
  EXPECT_THAT(run.err(), Not(HasSubstr("err1")));
  EXPECT_EQ(read_file(logs.path() + "/attempt_0/0/stdout.log"), "out0\n");
  EXPECT_FALSE(std::filesystem::exists(logs.path() + "/attempt_0/0/stderr.log"));
  EXPECT_EQ(read_file(logs.path() + "/attempt_0/1/stdout.log"), "out1\n");
  EXPECT_EQ(read_file(logs.path() + "/attempt_0/1/stderr.log"), "err1\n");
}

TEST(LogFiles, EachRestartHasItsOwnAndRedirectedErrorsAreStillReported) {
  const TemporaryFolder logs;
  Launched run(run_shell(2, "[ $RANK = 1 ] && { echo bad >&2; exit 3; }; exec sleep 60",
                         {"--log-dir", logs.path(), "--redirects=3", "--max-restarts=1"}));
  EXPECT_EQ(run.finish(), 3);
  EXPECT_EQ(read_file(logs.path() + "/attempt_1/1/stderr.log"), "bad\n");
  EXPECT_EQ(occurrences(run.err(), "  | bad\n"), 2);
}

TEST(LogFiles, AnImpossibleFolderIsAnError) {
  Launched run(run_shell(2, "echo started", {"--log-dir", "/dev/null/logs"}));
  EXPECT_EQ(run.finish(), 2);
  EXPECT_THAT(run.err(), HasSubstr("--log-dir"));
  EXPECT_EQ(run.out(), "");
  EXPECT_TRUE(run.tmp().empty());
}

}  // namespace
}  // namespace tessera::launch_test
