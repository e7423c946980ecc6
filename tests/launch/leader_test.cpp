// The decisions of node 0 about the rounds of several hosts, with documents and times made up here.
#include "launch/rounds/leader.h"

#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using End = NodeDocument::End;
using Ordered = Order::Kind;

constexpr const char* kSettings = "flags";

LaunchOptions hosts(int least, int most, int restarts) {
  LaunchOptions options;
  options.nnodes = most;
  options.min_nnodes = least;
  options.max_restarts = restarts;
  options.rejoin_timeout = 10s;
  options.restart_delay = 0ms;
  return options;
}

/// Launchers that write once a second, and their leader.
class Play {
 public:
  explicit Play(const LaunchOptions& options)
      : options_(options), leader_(options_, kSettings, now_) {}

  NodeDocument& node(int number) {
    NodeDocument& document = nodes_[number];
    document.node = number;
    document.settings = kSettings;
    document.host = "h" + std::to_string(number);
    if (document.incarnation.empty()) document.incarnation = "first";
    return document;
  }
  void arrive(std::initializer_list<int> numbers) {
    for (const int number : numbers) node(number);
  }
  void disappear(int number) { nodes_.erase(number); }
  /// A launcher ends its ranks of the current round.
  void end(int number, End how, const std::string& text = "", bool cause = true) {
    NodeDocument& document = node(number);
    document.began = document.ended = order_.round;
    document.end = how;
    document.text = text;
    document.cause_known = cause;
  }
  /// All that take part have begun.
  void begun() {
    for (const int number : order_.nodes)
      if (nodes_.count(number)) node(number).began = order_.round;
  }
  const Order& after(std::chrono::seconds time) {
    for (auto left = time + 1s; left > 0s; left -= 1s) {
      for (auto& [number, document] : nodes_) {
        ++document.beat;
        leader_.hear(document, now_);
      }
      order_ = leader_.step(now_);
      now_ += 1s;
    }
    return order_;
  }
  const Order& now() { return after(0s); }
  bool all_left() { return leader_.all_left(now_); }

 private:
  const LaunchOptions options_;
  Leader::Clock::time_point now_{};
  std::map<int, NodeDocument> nodes_;
  Leader leader_;
  Order order_;
};

TEST(LeaderTest, TheFirstRoundBeginsWhenAllHostsAreThere) {
  Play play(hosts(1, 3, 0));
  play.arrive({0, 2});
  EXPECT_EQ(play.after(5s).kind, Ordered::wait);
  EXPECT_THAT(play.now().text, HasSubstr("waiting for node 1"));
  play.arrive({1});
  EXPECT_EQ(play.now().kind, Ordered::begin);
  EXPECT_THAT(play.now().nodes, ElementsAre(0, 1, 2));
  EXPECT_EQ(play.now().round, 0);
}

TEST(LeaderTest, AnOrderSaysHowManyRanksEachHostHas) {
  Play play(hosts(1, 3, 0));
  play.arrive({0, 1, 2});
  play.node(0).ranks = 3;
  play.disappear(1);
  play.node(2).ranks = 2;
  play.after(11s);
  EXPECT_THAT(play.now().nodes, ElementsAre(0, 2));
  EXPECT_THAT(play.now().ranks, ElementsAre(3, 2));
  EXPECT_EQ(Order::decode(play.now().encode()), play.now());
  EXPECT_EQ(NodeDocument::decode(play.node(2).encode())->ranks, 2);
  for (const int bad : {0, -1, std::numeric_limits<int>::max()}) {
    Order order = play.now();
    order.ranks[1] = bad;
    EXPECT_EQ(Order::decode(order.encode()), std::nullopt) << bad;
  }
}

TEST(LeaderTest, AHostThatDoesNotComeIsLeftOutAfterTheTimeOut) {
  Play play(hosts(2, 3, 0));
  play.arrive({0, 2});
  EXPECT_EQ(play.after(8s).kind, Ordered::wait);
  EXPECT_EQ(play.after(3s).kind, Ordered::begin);
  EXPECT_THAT(play.now().nodes, ElementsAre(0, 2));
  EXPECT_THAT(play.now().text, HasSubstr("without node 1, which did not come within 10 s"));
}

TEST(LeaderTest, TooFewHostsAreAnErrorThatNamesTheAbsentOnes) {
  Play play(hosts(3, 4, 0));
  play.arrive({0, 2});
  EXPECT_EQ(play.after(11s).kind, Ordered::over);
  EXPECT_THAT(play.now().text, HasSubstr("nodes 1, 3 did not come within 10 s (--rejoin-timeout): "
                                         "2 hosts here, 3 or more expected"));
}

TEST(LeaderTest, AFailureEndsTheRoundEverywhereAndAllBeginAgain) {
  Play play(hosts(2, 2, 1));
  play.arrive({0, 1});
  play.now();
  play.begun();
  // The consequence is noticed first.
  play.end(0, End::failed, "rank 0 exited with code 1", false);
  EXPECT_EQ(play.now().kind, Ordered::fail);
  EXPECT_EQ(play.after(3s).kind, Ordered::fail) << "the ranks of node 1 still run";
  play.end(1, End::failed, "rank 1 was killed by SIGKILL");
  EXPECT_THAT(play.now().text,
              HasSubstr("restart 1 of 1, because rank 1 was killed by SIGKILL on node 1 (h1)"));
  EXPECT_EQ(play.now().kind, Ordered::begin);
  EXPECT_EQ(play.now().round, 1);
  play.begun();
  play.end(0, End::failed, "rank 0 exited with code 7");
  play.now();
  play.end(1, End::followed);
  EXPECT_EQ(play.now().kind, Ordered::over) << "no restart is left";
  EXPECT_THAT(play.now().text, HasSubstr("rank 0 exited with code 7 on node 0 (h0)"));
}

TEST(LeaderTest, ALauncherThatDiesIsWaitedForAndThenLeftOut) {
  Play play(hosts(1, 2, 3));
  play.arrive({0, 1});
  play.now();
  play.begun();
  play.disappear(1);
  play.end(0, End::failed, "rank 0 exited with code 1", false);
  EXPECT_EQ(play.after(7s).kind, Ordered::fail);
  EXPECT_EQ(play.after(5s).kind, Ordered::begin);
  EXPECT_THAT(play.now().nodes, ElementsAre(0));
}

TEST(LeaderTest, ASilentLauncherEndsTheRoundAfterTheTimeOut) {
  Play play(hosts(1, 2, 3));
  play.arrive({0, 1});
  play.now();
  play.begun();
  play.disappear(1);
  EXPECT_EQ(play.after(8s).kind, Ordered::begin);
  EXPECT_EQ(play.after(3s).kind, Ordered::fail);
  EXPECT_THAT(play.now().text, HasSubstr("the launcher of node 1 (h1) was not heard of for 10 s"));
}

TEST(LeaderTest, AShortSilenceChangesNothing) {
  Play play(hosts(1, 2, 3));
  play.arrive({0, 1});
  play.now();
  play.begun();
  const NodeDocument kept = play.node(1);
  play.disappear(1);
  EXPECT_EQ(play.after(6s).kind, Ordered::begin);
  play.node(1) = kept;
  play.node(1).beat += 1000;
  EXPECT_EQ(play.after(20s).kind, Ordered::begin);
  EXPECT_EQ(play.now().round, 0);
}

TEST(LeaderTest, AFurtherHostIsTakenInAndCostsNoRestart) {
  Play play(hosts(1, 2, 0));
  play.arrive({0});
  EXPECT_EQ(play.after(11s).kind, Ordered::begin);
  play.begun();
  play.arrive({1});
  EXPECT_EQ(play.now().kind, Ordered::regroup);
  EXPECT_THAT(play.now().text, HasSubstr("node 1 came"));
  play.end(0, End::followed);
  play.now();
  EXPECT_EQ(play.now().kind, Ordered::begin);
  EXPECT_THAT(play.now().nodes, ElementsAre(0, 1));
  EXPECT_EQ(play.now().round, 1);
}

TEST(LeaderTest, ALauncherThatIsStartedAnewIsANewHost) {
  Play play(hosts(2, 2, 1));
  play.arrive({0, 1});
  play.now();
  play.begun();
  play.disappear(1);
  play.arrive({1});
  play.node(1).incarnation = "second";
  EXPECT_EQ(play.now().kind, Ordered::fail);
  EXPECT_THAT(play.now().text, HasSubstr("the launcher of node 1 (h1) was started anew"));
  play.end(0, End::followed);
  play.now();
  EXPECT_EQ(play.now().kind, Ordered::begin);
  EXPECT_THAT(play.now().incarnations, ElementsAre("first", "second"));
  NodeDocument old = play.node(1);
  old.incarnation = "first";
  EXPECT_EQ(play.now().place_of(old), -1);
  EXPECT_EQ(play.now().place_of(play.node(1)), 1);
}

TEST(LeaderTest, AStopOnOneHostIsNoFailure) {
  Play play(hosts(1, 2, 5));
  play.arrive({0, 1});
  play.now();
  play.begun();
  play.end(1, End::stopped, "SIGTERM");
  EXPECT_EQ(play.now().kind, Ordered::stop);
  play.end(0, End::followed);
  EXPECT_EQ(play.now().kind, Ordered::over);
  EXPECT_THAT(play.now().text, HasSubstr("no restart: SIGTERM on node 1 (h1)"));
}

TEST(LeaderTest, TheEndIsWhenAllRanksOfAllHostsHaveEnded) {
  Play play(hosts(2, 2, 5));
  play.arrive({0, 1});
  play.now();
  play.begun();
  play.end(1, End::done);
  EXPECT_EQ(play.after(20s).kind, Ordered::begin);
  play.end(0, End::done);
  EXPECT_EQ(play.now().kind, Ordered::over);
  EXPECT_EQ(play.now().text, "");
  EXPECT_FALSE(play.all_left());
  play.node(1).left = true;
  play.now();
  EXPECT_TRUE(play.all_left());
}

TEST(LeaderTest, AHostWithOtherFlagsIsNotTakenIn) {
  Play play(hosts(1, 2, 0));
  play.arrive({0, 1});
  play.node(1).settings = "other flags";
  EXPECT_EQ(play.now().kind, Ordered::begin);
  EXPECT_THAT(play.now().nodes, ElementsAre(0));
  Play fixed(hosts(2, 2, 0));
  fixed.arrive({0, 1});
  fixed.node(1).settings = "other flags";
  EXPECT_EQ(fixed.now().kind, Ordered::over);
  EXPECT_THAT(fixed.now().text, HasSubstr("other flags on node 1"));
}

TEST(DocumentsTest, AreReadAsTheyWereWritten) {
  NodeDocument document{3, "abc",       7,    "host", "flags", 4,   2,
                        1, End::failed, true, false,  "why",   true};
  const auto read = NodeDocument::decode(document.encode());
  ASSERT_TRUE(read);
  EXPECT_EQ(read->encode(), document.encode());
  EXPECT_EQ(read->text, "why");
  Order order{Ordered::regroup, 4, {0, 3}, {"a", "b"}, {1, 2}, "text", "flags"};
  EXPECT_EQ(Order::decode(order.encode()), order);
  EXPECT_EQ(Order::decode("junk"), std::nullopt);
  EXPECT_FALSE(NodeDocument::decode(""));
  EXPECT_FALSE(NodeDocument::decode(order.encode()));
  document.text = "not UTF-8: \xff";
  EXPECT_TRUE(NodeDocument::decode(document.encode()));
  document.end = static_cast<End>(9);
  EXPECT_FALSE(NodeDocument::decode(document.encode())) << "of a newer launcher";
}

}  // namespace
}  // namespace tessera::launch
