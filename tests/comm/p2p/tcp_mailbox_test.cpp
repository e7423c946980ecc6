// Messages over the TCP connections of tcp_mailbox.cpp, between mailboxes of one process.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <unistd.h>

#include "comm/p2p/mailbox.h"
#include "comm/store/addresses.h"
#include "comm/store/socket.h"
#include "harness/ranks.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Mailboxes = std::vector<std::unique_ptr<Mailbox>>;

/// The message of what `call` throws; empty if it throws nothing.
std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

World member(int rank, int size, const c10::intrusive_ptr<c10d::Store>& store,
             std::chrono::milliseconds timeout = 20s) {
  ProcessGroupOptions options;
  options.timeout = timeout;
  auto world = World::start(rank, size, options);
  world.store = store;
  return world;
}

Mailboxes mailboxes(int size, const c10::intrusive_ptr<c10d::Store>& store =
                                  c10::make_intrusive<c10d::HashStore>()) {
  std::vector<std::future<std::unique_ptr<Mailbox>>> made;
  for (int rank = 0; rank < size; ++rank)
    made.push_back(std::async(std::launch::async,
                              [=] { return make_tcp_mailbox(member(rank, size, store)); }));
  Mailboxes result;
  for (auto& one : made) result.push_back(one.get());
  return result;
}

int open_sockets() {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    count += std::filesystem::read_symlink(entry, error).string().starts_with("socket:");
  }
  return count;
}

at::Tensor bytes(int64_t size, int value = 0) { return at::full({size}, value, at::kByte); }

TEST(TcpMailbox, LargeMessagesPassEachOtherAndArriveInTheOrderOfTheirTag) {
  constexpr int64_t kSize = 24 << 20;  // more than the buffers of two sockets
  const auto box = mailboxes(2);
  std::vector<at::Tensor> sent, received;
  std::vector<std::unique_ptr<Message>> messages;
  for (const int rank : {0, 1}) {
    for (const int i : {0, 1}) {
      sent.push_back(at::randint(256, {kSize + i}, at::kByte));
      messages.push_back(box[rank]->send(sent.back(), 1 - rank, 7));
    }
  }
  for (const int rank : {1, 0}) {
    for (const int i : {0, 1}) {
      received.push_back(bytes(kSize + i));
      messages.push_back(box[rank]->receive(received.back(), 1 - rank, 7));
    }
  }
  for (auto& message : messages) message->wait(20s);
  for (size_t i = 0; i < sent.size(); ++i) EXPECT_TRUE(at::equal(sent[i], received[i])) << i;
}

TEST(TcpMailbox, AReceiverMayPostInAnotherOrderThanTheSender) {
  constexpr int64_t kSize = 16 << 20;
  for (const int sender : {0, 1}) {
    const auto box = mailboxes(2);
    std::vector<at::Tensor> sent, received;
    std::vector<std::unique_ptr<Message>> leaving;
    for (const int tag : {0, 1, 2}) {
      sent.push_back(bytes(kSize + tag, tag + 1));
      leaving.push_back(box[sender]->send(sent.back(), 1 - sender, tag));
    }
    for (const int tag : {2, 1, 0}) {
      auto tensor = bytes(kSize + tag);
      box[1 - sender]->receive(tensor, sender, tag)->wait(20s);
      EXPECT_TRUE(at::equal(tensor, sent[tag])) << tag;
    }
    for (auto& message : leaving) message->wait(20s);
  }
}

int64_t resident_bytes() {
  int64_t all = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> all >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST(TcpMailbox, WhatNobodyWaitsForStaysWithItsSender) {
  constexpr int64_t kSize = 256 << 20;
  const auto box = mailboxes(2);
  const auto sent = at::zeros({kSize}, at::kByte);
  auto small = bytes(1), arrived = bytes(1);  // rank 1 connects when it has a message
  auto first = box[0]->send(small, 1, 1);
  box[1]->receive(arrived, 0, 1)->wait(20s);
  const auto before = resident_bytes();
  auto message = box[0]->send(sent, 1, 0);
  EXPECT_THAT(thrown_by([&] { message->wait(500ms); }), HasSubstr("timed out"));
  EXPECT_LT(resident_bytes() - before, 32 << 20) << "of pages of zeros it has read a few MiB";
}

TEST(TcpMailbox, AMessageKeepsItsTensor) {
  const auto box = mailboxes(2);
  const auto sent = bytes(1), wanted = bytes(1);
  const auto message = box[0]->send(sent, 1, 1), late = box[1]->receive(wanted, 0, 2);
  EXPECT_EQ(sent.use_count(), 2U);
  EXPECT_EQ(wanted.use_count(), 2U);
}

TEST(TcpMailbox, OnlyRanksThatExchangeMessagesConnect) {
  constexpr int kSize = 8;
  const auto box = mailboxes(kSize);
  const int before = open_sockets();
  auto tensor = bytes(4), other = bytes(4, 1);
  auto sent = box[2]->send(other, 5, 0);
  box[5]->receive(tensor, 2, 0)->wait(20s);
  sent->wait(20s);
  auto answer = box[5]->send(other, 2, 0);
  box[2]->receive(tensor, 5, 0)->wait(20s);
  answer->wait(20s);
  const auto deadline = Clock::now() + 10s;  // by then the watch has ended
  while (open_sockets() != before + 2 && Clock::now() < deadline) std::this_thread::sleep_for(5ms);
  EXPECT_EQ(open_sockets(), before + 2) << "the two ends of one connection";
}

TEST(TcpMailbox, ARankThatEndsBeforeItsFirstMessageIsNotWaitedFor) {
  for (const int gone : {0, 1}) {
    auto box = mailboxes(2);
    auto tensor = bytes(4);
    const auto begun = Clock::now();
    auto waits = box[1 - gone]->receive(tensor, gone, 0);
    auto late = std::async(std::launch::async, [&] {
      std::this_thread::sleep_for(200ms);
      box[gone].reset();
    });
    EXPECT_THAT(thrown_by([&] { waits->wait(20s); }), HasSubstr("closed by the peer"));
    EXPECT_LT(Clock::now() - begun, 5s);
    late.get();
    auto next = box[1 - gone]->send(tensor, gone, 0);
    EXPECT_NE(thrown_by([&] { next->wait(20s); }), "");
  }
}

TEST(TcpMailbox, ARankThatHasEndedRefuses) {
  for (const int gone : {0, 1}) {
    auto box = mailboxes(2);
    box[gone].reset();
    auto tensor = bytes(4);
    EXPECT_THAT(thrown_by([&] { box[1 - gone]->receive(tensor, gone, 0)->wait(20s); }),
                HasSubstr("Connection refused"));
  }
}

TEST(TcpMailbox, WhatARankSentBeforeItEndedArrives) {
  for (const int sender : {0, 1}) {
    auto box = mailboxes(2);
    const auto sent = bytes(100, 3);
    auto received = bytes(100);
    {
      auto arriving = box[1 - sender]->receive(received, sender, 1);
      box[sender]->send(sent, 1 - sender, 0)->wait(20s);
      box[sender]->send(sent, 1 - sender, 1)->wait(20s);
      arriving->wait(20s);
      box[sender].reset();
    }
    received.zero_();
    box[1 - sender]->receive(received, sender, 0)->wait(20s);
    EXPECT_TRUE(at::equal(sent, received));
    EXPECT_NE(thrown_by([&] { box[1 - sender]->receive(received, sender, 2)->wait(20s); }), "");
  }
}

TEST(TcpMailbox, AnAbortedWaitEndsAndItsMemoryIsNotWrittenToLater) {
  const auto box = mailboxes(2);
  auto tensor = bytes(1 << 20);
  auto waits = box[0]->receive(tensor, 1, 0);
  auto aborts = std::async(std::launch::async, [&] {
    std::this_thread::sleep_for(100ms);
    waits->abort();
  });
  EXPECT_THAT(thrown_by([&] { waits->wait(20s); }), HasSubstr("aborted"));
  aborts.get();
  waits.reset();
  const auto sent = bytes(1 << 20, 9);
  auto leaving = box[1]->send(sent, 0, 0);
  std::this_thread::sleep_for(200ms);
  EXPECT_EQ(tensor.max().item<int>(), 0);
}

TEST(TcpMailbox, AMessageOfAnotherSizeIsAnErrorOnBothSides) {
  for (const bool posted_first : {false, true}) {
    const auto box = mailboxes(2);
    auto tensor = bytes(8);
    const auto sent = bytes(32 << 20);
    std::unique_ptr<Message> arriving, leaving;
    if (posted_first) arriving = box[1]->receive(tensor, 0, 0);
    leaving = box[0]->send(sent, 1, 0);
    if (!posted_first) {
      std::this_thread::sleep_for(100ms);
      arriving = box[1]->receive(tensor, 0, 0);
    }
    EXPECT_THAT(thrown_by([&] { arriving->wait(20s); }),
                HasSubstr("sent 33554432 bytes, expected 8"));
    EXPECT_NE(thrown_by([&] { leaving->wait(20s); }), "");
  }
}

/// Records what ranks write, so that a test can reach their ports.
struct ReadStore : c10d::HashStore {
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    {
      std::lock_guard lock(mutex);
      written[key] = {value.begin(), value.end()};
    }
    HashStore::set(key, value);
  }
  std::mutex mutex;
  std::map<std::string, std::string> written;
};

TEST(TcpMailbox, ConnectionsOfOthersChangeNothing) {
  const auto store = c10::make_intrusive<ReadStore>();
  const auto box = mailboxes(2, store);
  // Rank 0 accepts the connection. It has written "0 2 PORT TOKEN HOST", and what rank 1 wrote.
  const auto value = store->written.at("tcp/sum/0");
  int port = 0;
  ASSERT_EQ(std::sscanf(value.c_str(), "0 2 %d", &port), 1);
  std::vector<Socket> strangers;
  const std::string mark = "tessera2", guess(32, '0');
  const std::array<int32_t, 2> rank_and_kind{1, 0};
  const std::string claim(reinterpret_cast<const char*>(rank_and_kind.data()), 8);
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(connect_to("127.0.0.1", port, Clock::now() + 5s));
    const auto junk = i % 3 == 0   ? mark + guess + claim + std::string(100, 'x')
                      : i % 3 == 1 ? std::string(200, 'j')
                                   : std::string();
    ::send(strangers.back().fd(), junk.data(), junk.size(), MSG_NOSIGNAL);
  }
  const auto sent = bytes(1000, 5);
  auto received = bytes(1000);
  auto leaving = box[0]->send(sent, 1, 0);
  box[1]->receive(received, 0, 0)->wait(20s);
  leaving->wait(20s);
  EXPECT_TRUE(at::equal(sent, received));
  char byte;
  ASSERT_TRUE(wait_for(strangers[0], POLLIN, Clock::now() + 10s));
  EXPECT_LE(::recv(strangers[0].fd(), &byte, 1, 0), 0) << "a guessed token is turned away";
}

TEST(TcpMailbox, ARankThatDoesNotComeIsNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::future<std::string>> errors;
  for (const int rank : {0, 1, 3})
    errors.push_back(std::async(std::launch::async, [=] {
      return thrown_by([&] { make_tcp_mailbox(member(rank, 4, store, 300ms)); });
    }));
  for (auto& error : errors)
    EXPECT_THAT(error.get(), HasSubstr("over TCP within 300 ms: rank 2 did not arrive"));
}

/// A group of two ranks on two hosts, made while GLOO_DEVICE_TRANSPORT has this value.
std::string backend_or_error(const char* transport) {
  ::setenv("GLOO_DEVICE_TRANSPORT", transport, 1);
  std::array<std::string, 2> names;
  const auto errors = testing::run_ranks_catching(
      2, [&](ProcessGroup group, int rank) { names[rank] = group.backend_name(); }, {}, {0, 1});
  ::unsetenv("GLOO_DEVICE_TRANSPORT");
  return errors[0] ? testing::message_of(errors[0]) : names[0];
}

TEST(TcpMailbox, IsTheDefaultBetweenHostsUnlessAnotherTransportOfGlooIsWanted) {
  EXPECT_EQ(backend_or_error(""), "tcp");
  EXPECT_EQ(backend_or_error("TCP"), "tcp");
  // No libtorch that is tested here has it, so Gloo refuses.
  EXPECT_THAT(backend_or_error("TCP_TLS"), HasSubstr("through Gloo"));
}

TEST(AddressOfInterface, IsThatOfTheFirstOneThatHasOne) {
  EXPECT_EQ(address_of_interface("lo", 0), "127.0.0.1");
  EXPECT_EQ(address_of_interface("nosuch0,lo", 0), "127.0.0.1");
  EXPECT_THAT(thrown_by([] { address_of_interface("nosuch0", 3); }),
              HasSubstr("rank 3: GLOO_SOCKET_IFNAME is 'nosuch0'; expected"));
}

}  // namespace
}  // namespace tessera::comm
