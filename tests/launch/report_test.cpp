#include "launch/supervise/report.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/supervise/blame.h"

namespace tessera::launch {
namespace {

using Kind = Cause::Kind;
using Report = detail::RankReport;

/// Ranks of one host in a world that may be larger. Ends are numbered in the order of the calls.
class Host {
 public:
  explicit Host(std::vector<int> ranks) {
    for (const int rank : ranks) states_.push_back({rank, 100 + rank, std::nullopt, 0});
  }
  Host& coded(int rank, int code) {
    end(rank).code = code;
    return *this;
  }
  Host& killed(int rank, int signal) {
    end(rank).signal = signal;
    return *this;
  }
  Host& stopped(int rank, int signal) {
    state(rank).stopped_by = signal;
    return *this;
  }
  /// The rank exits with 1 and an error that names `ranks`.
  Host& broken(int rank, std::vector<int> ranks) {
    return reports(rank, 1, {Report::Kind::broken, 0, std::move(ranks), "text"});
  }
  Host& agreed(int rank, std::vector<int> ranks) {
    return reports(rank, 2, {Report::Kind::agreed, 0, std::move(ranks), "text"});
  }
  Host& stops(int rank, bool itself) {
    return reports(
        rank, 143,
        {Report::Kind::stop, SIGTERM, itself ? std::vector{rank} : std::vector<int>(), ""});
  }
  Host& broken_by_lines(int rank) {
    end(rank).code = 1;
    state(rank).exit->broken_by_lines = true;
    return *this;
  }

  std::optional<Cause> before_the_end() const { return find_cause(states_, false); }
  Cause at_the_end() const { return find_cause(states_, true).value(); }

 private:
  Host& reports(int rank, int code, Report report) {
    end(rank).code = code;
    state(rank).exit->report = std::move(report);
    return *this;
  }
  RankState& state(int rank) { return states_.at(rank - states_.front().rank); }
  Exit& end(int rank) {
    Exit exit;
    exit.rank = rank;
    exit.pid = 100 + rank;
    exit.order = ended_++;
    state(rank).exit = exit;
    return *state(rank).exit;
  }
  std::vector<RankState> states_;
  int ended_ = 0;
};

void expect(const std::optional<Cause>& cause, Kind kind, int rank, int exit_code,
            const std::string& words) {
  ASSERT_TRUE(cause);
  EXPECT_EQ(static_cast<int>(cause->kind), static_cast<int>(kind));
  EXPECT_EQ(cause->rank, rank);
  EXPECT_EQ(cause->pid, 100 + rank);
  EXPECT_EQ(cause->exit_code(), exit_code);
  EXPECT_EQ(describe(*cause) + origin(*cause), words);
}

TEST(Blame, OfEqualFailuresTheFirstIsTheRootCause) {
  expect(Host({0, 1}).coded(1, 3).coded(0, 1).before_the_end(), Kind::failed, 1, 3,
         "rank 1 (pid 101) exited with code 3");
}

TEST(Blame, ADeathByAnExternalSignalRanksBeforeAnExitCode) {
  expect(Host({0, 1}).coded(0, 1).killed(1, SIGKILL).before_the_end(), Kind::failed, 1, 137,
         "rank 1 (pid 101) was killed by SIGKILL");
  expect(Host({0, 1}).coded(0, 1).killed(1, SIGABRT).before_the_end(), Kind::failed, 0, 1,
         "rank 0 (pid 100) exited with code 1");
}

TEST(Blame, ConsequencesRankLast) {
  auto host = Host({0, 1, 2}).broken_by_lines(0).broken(1, {2});
  EXPECT_FALSE(host.before_the_end());
  expect(host.coded(2, 3).before_the_end(), Kind::failed, 2, 3,
         "rank 2 (pid 102) exited with code 3");
  EXPECT_TRUE(mentions_broken_world(
      {"terminate called after throwing 'tessera::BrokenWorldError'", "what(): …"}));
  EXPECT_FALSE(mentions_broken_world({"out of memory"}));
}

TEST(Blame, ARankThatItsOwnErrorNamesIsTheRootCause) {
  auto host = Host({0, 1}).broken(0, {1});
  EXPECT_FALSE(host.before_the_end());
  expect(host.broken(1, {1}).before_the_end(), Kind::failed, 1, 1,
         "rank 1 (pid 101) exited with code 1");
}

TEST(Blame, AStoppedRankIsTheRootCause) {
  expect(Host({0, 1, 2}).stopped(1, SIGSTOP).broken(2, {1}).before_the_end(), Kind::stopped, 1,
         128 + SIGSTOP, "rank 1 (pid 101) is stopped (SIGSTOP)");
  // Without names, and with names of survivors that name no others.
  expect(Host({0, 1}).stopped(1, SIGSTOP).broken_by_lines(0).before_the_end(), Kind::stopped, 1,
         128 + SIGSTOP, "rank 1 (pid 101) is stopped (SIGSTOP)");
  auto wrong = Host({0, 1, 2}).stopped(0, SIGTSTP).broken(1, {2}).broken(2, {1});
  EXPECT_FALSE(wrong.before_the_end());
  expect(wrong.at_the_end(), Kind::stopped, 0, 128 + SIGTSTP,
         "rank 0 (pid 100) is stopped (SIGTSTP)");
}

TEST(Blame, AStoppedRankDoesNotHideAFailure) {
  expect(Host({0, 1, 2}).stopped(1, SIGSTOP).broken(2, {0}).killed(0, SIGKILL).before_the_end(),
         Kind::failed, 0, 137, "rank 0 (pid 100) was killed by SIGKILL");
}

TEST(Blame, NamesAreFollowedFromRankToRank) {
  expect(Host({0, 1, 2}).stopped(2, SIGSTOP).broken(0, {1}).broken(1, {2}).before_the_end(),
         Kind::stopped, 2, 128 + SIGSTOP, "rank 2 (pid 102) is stopped (SIGSTOP)");
}

TEST(Blame, ARankThatExitedWithZeroBeforeIsTheRootCause) {
  const std::string words =
      "rank 1 (pid 101) exited with code 0 while the other ranks still needed it";
  expect(Host({0, 1}).coded(1, 0).broken(0, {1}).before_the_end(), Kind::left, 1, 1, words);
  expect(Host({0, 1}).coded(1, 0).broken_by_lines(0).before_the_end(), Kind::left, 1, 1, words);
  // It ended afterwards, or others failed by themselves.
  expect(Host({0, 1}).broken_by_lines(0).coded(1, 0).at_the_end(), Kind::unknown, 0, 1,
         "rank 0 (pid 100) exited with code 1");
  expect(Host({0, 1}).coded(1, 0).coded(0, 3).at_the_end(), Kind::failed, 0, 3,
         "rank 0 (pid 100) exited with code 3");
}

TEST(Blame, ARankThatRunsButIsNamedIsTheRootCauseInTheEnd) {
  auto host = Host({0, 1}).broken(0, {1});
  EXPECT_FALSE(host.before_the_end());
  expect(host.at_the_end(), Kind::late, 1, 1,
         "rank 1 (pid 101) still runs, but the other ranks waited for it in vain");
}

TEST(Blame, OfAnAgreedErrorTheRankThatBeganIsTheRootCause) {
  auto host = Host({0, 1, 2}).agreed(0, {2}).agreed(1, {2});
  EXPECT_FALSE(host.before_the_end());
  expect(host.agreed(2, {2}).before_the_end(), Kind::failed, 2, 2,
         "rank 2 (pid 102) exited with code 2");
  // All ranks began.
  expect(Host({0, 1}).agreed(1, {0, 1}).before_the_end(), Kind::failed, 1, 2,
         "rank 1 (pid 101) exited with code 2");
}

TEST(Blame, AFailureOnAnotherHostIsNamed) {
  auto host = Host({2, 3}).agreed(3, {0}).agreed(2, {0});
  EXPECT_FALSE(host.before_the_end());
  expect(host.at_the_end(), Kind::elsewhere, 3, 2,
         "rank 3 (pid 103) exited with code 2; the failure began on rank 0, which is on another "
         "host");
  EXPECT_EQ(title(host.at_the_end()), "first failure");
  EXPECT_EQ(origin(Host({4}).broken(4, {0, 1}).at_the_end()),
            "; the failure began on ranks 0, 1, which are on other hosts");
}

TEST(Blame, ARequestToStopIsNoFailure) {
  expect(Host({2, 3}).stops(3, false).before_the_end(), Kind::request, 3, 143,
         "SIGTERM on another host stopped the program");
  expect(Host({0, 1}).stops(1, false).stops(0, true).before_the_end(), Kind::request, 0, 143,
         "SIGTERM to rank 0 (pid 100) stopped the program");
  expect(Host({0, 1}).stops(1, false).coded(0, 3).before_the_end(), Kind::failed, 0, 3,
         "rank 0 (pid 100) exited with code 3");
}

TEST(Blame, Words) {
  EXPECT_EQ(title(Host({0}).coded(0, 3).at_the_end()), "root cause");
  EXPECT_EQ(title(Host({0}).broken_by_lines(0).at_the_end()), "first failure");
  Exit exit;
  exit.broken_by_lines = true;
  EXPECT_EQ(describe_reason(exit), "because of another rank, according to its last lines");
  exit.report = Report{Report::Kind::broken, 0, {1, 3}, ""};
  EXPECT_EQ(describe_reason(exit), "because of ranks 1, 3, according to its error");
}

TEST(RankReport, KeepsItsValues) {
  const Report report{Report::Kind::stop, 15, {0, 12}, "two\nlines"};
  const auto read = Report::from_text(report.to_text());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->kind, Report::Kind::stop);
  EXPECT_EQ(read->signal, 15);
  EXPECT_EQ(read->ranks, (std::vector{0, 12}));
  EXPECT_EQ(read->text, "two\nlines");
  for (const char* junk : {"", "1 0 2", "7 0\n", "-1 0\n", "x\n", "0\n", "1 0 2x\n"})
    EXPECT_FALSE(Report::from_text(junk)) << junk;
}

}  // namespace
}  // namespace tessera::launch
