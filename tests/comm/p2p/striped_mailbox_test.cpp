// Messages in parts over several connections of a pair.
#include "comm/p2p/striped_mailbox.h"

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/base/world.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Mailboxes = std::vector<std::unique_ptr<Mailbox>>;

TEST(StripesFor, IsByWhatTheNetworkCarriesAndTheCoresOfARank) {
  EXPECT_EQ(stripes_for(0, 1, 64), 1);  // unknown
  EXPECT_EQ(stripes_for(1'000, 1, 64), 1);
  EXPECT_EQ(stripes_for(10'000, 1, 64), 1);
  EXPECT_EQ(stripes_for(25'000, 1, 64), 2);
  EXPECT_EQ(stripes_for(100'000, 1, 64), 4);
  EXPECT_EQ(stripes_for(400'000, 1, 64), 4);
  EXPECT_EQ(stripes_for(100'000, 4, 64), 2);  // each rank has a connection
  EXPECT_EQ(stripes_for(100'000, 8, 64), 1);
  EXPECT_EQ(stripes_for(100'000, 2, 6), 3);
  EXPECT_EQ(stripes_for(100'000, 4, 2), 1);
}

/// Notes the bytes of the messages that are sent through it.
class NotedMailbox final : public Mailbox {
 public:
  explicit NotedMailbox(std::vector<int64_t>& sent) : sent_(sent) {}
  const char* name() const override { return "noted"; }
  std::unique_ptr<Message> send(at::Tensor tensor, int, int) override {
    sent_.push_back(static_cast<int64_t>(tensor.nbytes()));
    return nullptr;
  }
  std::unique_ptr<Message> receive(at::Tensor, int, int) override { return nullptr; }

 private:
  std::vector<int64_t>& sent_;
};

TEST(StripedMailbox, LargeMessagesAloneTravelInParts) {
  std::vector<std::vector<int64_t>> sent(3);
  Mailboxes inner;
  for (auto& one : sent) inner.push_back(std::make_unique<NotedMailbox>(one));
  const auto mailbox = make_striped_mailbox(std::move(inner));
  constexpr int64_t kLeast = 256 << 10;
  mailbox->send(at::zeros({kLeast}, at::kByte), 1, 7);
  mailbox->send(at::zeros({kLeast / 2 + 1}), 1, 7);  // 4 bytes more than two parts
  mailbox->send(at::zeros({100, kLeast}, at::kByte), 1, 7);
  EXPECT_THAT(sent[0], ElementsAre(kLeast, kLeast, 100 * kLeast / 3));
  EXPECT_THAT(sent[1], ElementsAre(kLeast + 4, (100 * kLeast * 2 / 3) - 100 * kLeast / 3));
  EXPECT_THAT(sent[2], ElementsAre(100 * kLeast - 100 * kLeast * 2 / 3));
}

/// Two ranks with `stripes` connections.
Mailboxes two_ranks(int stripes) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto make = [=](int rank) {
    Mailboxes inner;
    for (int i = 0; i < stripes; ++i) {
      auto world = World::start(rank, 2, {.timeout = 20s});
      world.store = c10::make_intrusive<c10d::PrefixStore>(std::to_string(i) + "/", store);
      inner.push_back(make_tcp_mailbox(world));
    }
    return make_striped_mailbox(std::move(inner));
  };
  auto other = std::async(std::launch::async, [&] { return make(1); });
  Mailboxes ranks;
  ranks.push_back(make(0));
  ranks.push_back(other.get());
  return ranks;
}

TEST(StripedMailbox, MessagesOfATagArriveInOrderWhateverTheirSizes) {
  for (const int stripes : {1, 2, 4}) {
    const auto ranks = two_ranks(stripes);
    EXPECT_STREQ(ranks[0]->name(), "tcp");
    const std::vector<int64_t> sizes{1, 65'537, 300'001, 6 << 20, 131'073, 1 << 20, 2'000'003};
    std::vector<at::Tensor> sent, arrived;
    std::vector<std::unique_ptr<Message>> messages;
    for (const int tag : {0, 1}) {
      for (const int64_t size : sizes) {
        sent.push_back(at::randint(0, 1000, {size}, at::kInt));
        messages.push_back(ranks[0]->send(sent.back(), 1, tag));
      }
    }
    arrived.resize(sent.size());
    for (const int tag : {1, 0}) {  // another order than they were sent in
      for (size_t i = 0; i < sizes.size(); ++i) {
        auto& one = arrived[tag * sizes.size() + i] = at::zeros({sizes[i]}, at::kInt);
        messages.push_back(ranks[1]->receive(one, 0, tag));
      }
    }
    for (const auto& message : messages) message->wait(20s);
    for (size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(sent[i].equal(arrived[i])) << i;
  }
}

/// The error of waiting for it; empty if there is none.
std::string failure_of(Message& message, std::chrono::milliseconds timeout = 20s) {
  try {
    message.wait(timeout);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST(StripedMailbox, AWaitEndsAtItsTimeAndByAbort) {
  const auto ranks = two_ranks(3);
  const auto late = ranks[1]->receive(at::zeros({1 << 20}, at::kByte), 0, 1);
  EXPECT_NE(failure_of(*late, 50ms), "");
  late->abort();
  EXPECT_THAT(failure_of(*late), HasSubstr("aborted"));
}

TEST(StripedMailbox, AWrongSizeIsAnError) {
  const auto ranks = two_ranks(3);
  const auto sent = ranks[0]->send(at::zeros({4 << 20}, at::kByte), 1, 1);
  const auto expected = ranks[1]->receive(at::zeros({1 << 20}, at::kByte), 0, 1);
  EXPECT_THAT(failure_of(*expected), HasSubstr("bytes, expected 349525"));
}

TEST(StripedMailbox, ARankThatEndsIsAnErrorInTime) {
  auto ranks = two_ranks(3);
  const auto never = ranks[0]->receive(at::zeros({16 << 20}, at::kByte), 1, 1);
  const auto begun = std::chrono::steady_clock::now();
  ranks[1].reset();
  EXPECT_NE(failure_of(*never), "");
  EXPECT_LT(std::chrono::steady_clock::now() - begun, 10s);
}

}  // namespace
}  // namespace tessera::comm
