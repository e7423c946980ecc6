#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "launch/launched.h"

namespace tessera::launch_test {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(Run, EveryRankGetsItsVariables) {
  Launched run(run_shell(3,
                         "echo \"rank=$RANK local=$LOCAL_RANK world=$WORLD_SIZE addr=$MASTER_ADDR "
                         "omp=$OMP_NUM_THREADS;\""));
  EXPECT_EQ(run.finish(), 0);
  for (const char* rank : {"0", "1", "2"}) {
    EXPECT_THAT(run.out(), HasSubstr(std::string("rank=") + rank + " local=" + rank +
                                     " world=3 addr=127.0.0.1 omp=1;"));
  }
  EXPECT_EQ(occurrences(run.err(), "OMP_NUM_THREADS"), 2);  // one line mentions it twice
}

TEST(Run, TheRendezvousFolderIsCommonPrivateAndRemoved) {
  Launched run(
      run_shell(2, "stat -c 'dir=%a:%n;' $TESSERA_RENDEZVOUS; echo x >$TESSERA_RENDEZVOUS/$RANK"));
  EXPECT_EQ(run.finish(), 0);
  std::set<std::string> folders;
  for (size_t at = 0; (at = run.out().find("dir=", at)) != std::string::npos; ++at)
    folders.insert(run.out().substr(at, run.out().find(';', at) - at));
  ASSERT_EQ(folders.size(), 1u) << run.out();
  EXPECT_THAT(*folders.begin(), HasSubstr("dir=700:" + run.tmp().path()));
  EXPECT_TRUE(run.tmp().empty());
}

TEST(Run, TheRanksOfOneHostShareASecretThatOthersDoNotKnow) {
  const auto secrets_of = [](const std::vector<std::string>& arguments) {
    Launched run(arguments);
    EXPECT_EQ(run.finish(), 0);
    std::set<std::string> secrets;
    for (size_t at = 0; (at = run.out().find("secret=", at)) != std::string::npos; ++at)
      secrets.insert(run.out().substr(at, run.out().find(';', at) - at));
    return secrets;
  };
  const auto first = secrets_of(run_shell(2, "echo \"secret=$TESSERA_SECRET;\"")),
             second = secrets_of(run_shell(2, "echo \"secret=$TESSERA_SECRET;\""));
  ASSERT_EQ(first.size(), 1u);
  EXPECT_THAT(*first.begin(), testing::MatchesRegex("secret=[0-9a-f]{32}"));
  EXPECT_NE(first, second);
  EXPECT_THAT(secrets_of(run_shell(2, "echo \"secret=$TESSERA_SECRET;\"",
                                   {"--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1",
                                    "--master-port=4711"})),
              testing::ElementsAre("secret="));
}

TEST(Run, EveryRunHasItsOwnPort) {
  Launched one(run_shell(1, "echo $MASTER_PORT; read line"), {}, {});
  Launched given(run_shell(1, "echo $MASTER_PORT", {"--master_port=4711"}));
  EXPECT_EQ(one.finish(), 1);  // read at the end of its input
  EXPECT_EQ(given.finish(), 0);
  EXPECT_GT(std::atoi(one.out().c_str()), 0);
  EXPECT_EQ(given.out(), "4711\n");
}

TEST(Run, ArgumentsArePassedUnchanged) {
  Launched run({"run", "-n1", "--", "sh", "-c", "for a; do echo \"<$a>\"; done", "--", "-n", "9",
                "", "a b", "--", "--nnodes=7"});
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(run.out(), "<-n>\n<9>\n<>\n<a b>\n<-->\n<--nnodes=7>\n");
}

TEST(Run, ExitCodesArePassedOn) {
  EXPECT_EQ(Launched(run_shell(1, "exit 5")).finish(), 5);
  EXPECT_EQ(Launched(run_shell(2, "exit 6")).finish(), 6);
  EXPECT_EQ(Launched(run_shell(1, "kill -TERM $$")).finish(), 143);
}

TEST(Run, OnlyRankZeroReadsTheInput) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "hello\n", 6), 6);
  close(ends[1]);
  Launched run(run_shell(2, "if read x; then echo got=$x; else echo none; fi"), {},
               {.in = ends[0]});
  close(ends[0]);
  EXPECT_EQ(run.finish(), 0);
  EXPECT_THAT(run.out(), HasSubstr("got=hello\n"));
  EXPECT_THAT(run.out(), HasSubstr("[rank 1] none\n"));
}

TEST(Run, SignalsOfTheProgramAreAtTheirDefaults) {
  Launched run(run_shell(2, "grep -hE 'Sig(Blk|Ign)' /proc/self/status"));
  EXPECT_EQ(run.finish(), 0);
  // Signals 32 and 33 are reserved by the C library, which refuses to change them. A parent that
  // does not use the C library may have left them ignored.
  const uint64_t libc_own = uint64_t{3} << 31;
  int masks = 0;
  std::istringstream lines(run.out());
  for (std::string line; std::getline(lines, line);) {
    EXPECT_EQ(std::stoull(line.substr(line.find("\t") + 1), nullptr, 16) & ~libc_own, 0u) << line;
    ++masks;
  }
  EXPECT_EQ(masks, 4) << run.out();
}

TEST(Run, AProgramThatCannotBeStartedIsAnError) {
  const TemporaryFolder folder;
  const std::string plain = folder.path() + "/plain";
  std::ofstream(plain) << "text";
  const std::string odd = folder.path() + "/odd";
  std::ofstream(odd) << "text";
  chmod(odd.c_str(), 0755);
  const std::string lost = folder.path() + "/lost";
  std::ofstream(lost) << "#!/no/such/interpreter\n";
  chmod(lost.c_str(), 0755);
  const struct {
    std::string program, word;
    int code;
  } cases[] = {{"no-such-program", "not found in PATH", 127},
               {"./no-such-program", "No such file", 127},
               {folder.path(), "is a folder", 126},
               {plain, "not executable", 126},
               {odd, "#!/bin/sh", 126},
               {lost, "interpreter", 127}};
  for (const auto& c : cases) {
    Launched run({"run", "-n", "2", c.program});
    EXPECT_EQ(run.finish(), c.code) << c.program;
    EXPECT_THAT(run.err(), HasSubstr(c.word));
    EXPECT_TRUE(run.tmp().empty());
  }
}

TEST(Run, WrongFlagsAreErrorsThatNameThem) {
  const struct {
    std::vector<std::string> arguments;
    std::string word;
  } cases[] = {
      {{"run", "--nproc_per_nod", "4", "true"}, "did you mean \"--nproc-per-node\"?"},
      {{"run", "-n", "0", "true"}, "--nproc-per-node = '0'"},
      {{"run", "-n"}, "-n: expected a value"},
      {{"run", "-n", "2"}, "no program given"},
      {{"run", "--nnodes=2", "true"}, "--node-rank is missing"},
      {{"run", "--standalone", "--nnodes=2", "true"}, "--standalone"},
      {{"run", "--master-port", "70000", "true"}, "from 1 to 65535"},
      {{"run", "--tee", "9", "true"}, "--tee = '9'"},
      {{"run", "--log-dir", "", "true"}, "--log-dir = '': expected a value"},
      {{"run", "--log_dir=", "true"}, "--log-dir = '': expected a value"},
      {{"run", "-t", "", "true"}, "-t = '': expected a value"},
      {{"run", "--redirects=0:1,0:2", "true"},
       "--redirects = '0:1,0:2': expected every local rank once"},
      {{"rum"}, "did you mean \"run\"?"},
      {{}, "Usage"},
  };
  for (const auto& c : cases) {
    Launched run(c.arguments);
    EXPECT_EQ(run.finish(), 2);
    EXPECT_THAT(run.err(), HasSubstr(c.word));
    EXPECT_EQ(run.out(), "");
  }
}

/// Arguments that run the command with a limit on its open files.
std::vector<std::string> limited(int64_t files, const std::vector<std::string>& arguments) {
  std::vector<std::string> result = {
      "run",           "sh", "-c", "ulimit -n " + std::to_string(files) + "; exec \"$@\"", "sh",
      TESSERA_COMMAND, "run"};
  result.insert(result.end(), arguments.begin(), arguments.end());
  return result;
}

TEST(Run, OpenFilesAreCountedBeforeRanksStart) {
  const TemporaryFolder logs;
  const std::vector<std::vector<std::string>> cases = {
      {"-n", "1"},
      {"-n", "2"},
      {"-n", "30"},
      {"-n", "9", "--log-dir", logs.path()},
      {"-n", "9", "--log-dir", logs.path(), "--redirects", "8:3,1:2"}};
  for (std::vector<std::string> arguments : cases) {
    const std::string flag = "--nproc-per-node = '" + arguments[1] + "': needs ";
    arguments.insert(arguments.end(), {"echo", "started"});
    Launched refused(limited(6, arguments));
    EXPECT_EQ(refused.finish(), 2);
    EXPECT_EQ(refused.out(), "");
    EXPECT_THAT(refused.err(),
                HasSubstr("'ulimit -n' allows 6: expected fewer ranks or 'ulimit -n "));
    const size_t at = refused.err().find(flag);
    ASSERT_NE(at, std::string::npos) << refused.err();
    const int enough = std::atoi(refused.err().c_str() + at + flag.size());
    EXPECT_EQ(Launched(limited(enough - 1, arguments)).finish(), 2);
    Launched started(limited(enough, arguments));
    EXPECT_EQ(started.finish(), 0) << started.err();
  }
}

TEST(Run, MoreRanksThanOpenFilesAllowAreAnError) {
  Launched run(limited(1000, {"-n", "1000000", "true"}));
  EXPECT_EQ(run.finish(), 2);
  EXPECT_THAT(run.err(), HasSubstr("--nproc-per-node = '1000000': needs 40000"));
}

TEST(Run, TrainWithoutAConfigStartsNoRanks) {
  // A script in place of the trainer, beside a copy of the command; it prints how it was started.
  const TemporaryFolder folder;
  std::filesystem::copy_file(TESSERA_COMMAND, folder.path() + "/tessera");
  const std::string trainer = folder.path() + "/tessera-train";
  std::ofstream(trainer) << "#!/bin/sh\necho \"rank=$RANK; $*\"\n";
  chmod(trainer.c_str(), 0755);
  const auto train = [&](std::vector<std::string> words) {
    words.insert(words.begin(), {"-c", "unset RANK WORLD_SIZE; exec \"$@\"", "sh",
                                 folder.path() + "/tessera", "train", "-n", "2"});
    words.insert(words.begin(), {"run", "sh"});
    Launched run(words);
    EXPECT_EQ(run.finish(), 0) << run.err();
    return run.out();
  };
  EXPECT_EQ(train({}), "rank=; \n");
  EXPECT_EQ(train({"--help"}), "rank=; --help\n");
  EXPECT_EQ(train({"--dump-config", "full"}), "rank=; --dump-config full\n");
  EXPECT_THAT(train({"--no-resume", "c.yaml"}),
              HasSubstr("rank=0; c.yaml checkpoint.resume=false\n"));
}

TEST(Run, VersionAndHelp) {
  Launched version({"--version"});
  EXPECT_EQ(version.finish(), 0);
  EXPECT_THAT(version.out(), HasSubstr("tessera "));
  Launched help({"run", "--help"});
  EXPECT_EQ(help.finish(), 0);
  EXPECT_THAT(help.out(), HasSubstr("--nproc-per-node"));
}

TEST(FirstProcess, TheLauncherLeavesNoZombies) {
  // The launcher is the parent of orphans only as the first process of a pid namespace.
  const std::vector<std::string> front = {"unshare", "--pid", "--fork", "--kill-child",
                                          "--mount-proc"};
  if (std::system("unshare --pid --fork --mount-proc true 2>/dev/null") != 0)
    GTEST_SKIP() << "no pid namespaces here";
  auto arguments =
      run_shell(2,
                "i=0; while [ $i -lt 20 ]; do (sleep 0.05 &); i=$((i+1)); done; sleep 1; "
                "echo parent=$PPID zombies=$(cat /proc/[0-9]*/stat | grep -c ') Z 1 '); sleep 1");
  Launched run(arguments, {}, {.front = front});
  EXPECT_EQ(run.finish(), 0);
  EXPECT_EQ(occurrences(run.out(), "parent=1 zombies=0\n"), 2) << run.out();
}

}  // namespace
}  // namespace tessera::launch_test
