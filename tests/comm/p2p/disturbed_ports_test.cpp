// The ports at which ranks wait for each other, on two simulated hosts: strangers who keep many
// connections open, and a network that changes a bit.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "comm/p2p/tcp_strangers.h"
#include "comm/store/socket.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

/// A store that shows, and may change, the port that a rank writes for the others.
class PortStore : public c10d::HashStore {
 public:
  using OnPort = std::function<int(const std::string& key, int rank, int port)>;
  explicit PortStore(OnPort on_port) : on_port_(std::move(on_port)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    std::string text(value.begin(), value.end());
    // Lines "RANK SIZE PORT TOKEN HOST". The first is that of the rank that writes it.
    int rank = 0, size = 0, port = 0, read = 0;
    const bool told =
        key.find("tcp/sum/") != std::string::npos || key.find("tcp/all/") != std::string::npos;
    if (told && std::sscanf(text.c_str(), "%d %d %d %n", &rank, &size, &port, &read) == 3)
      text = std::to_string(rank) + " " + std::to_string(size) + " " +
             std::to_string(on_port_(key, rank, port)) + " " + text.substr(read);
    HashStore::set(key, {text.begin(), text.end()});
  }

 private:
  const OnPort on_port_;
};

/// Ranks as threads, on the hosts of these numbers. Returns what each throws.
std::vector<std::string> run(const std::vector<int>& hosts,
                             const c10::intrusive_ptr<PortStore>& store,
                             const std::function<void(ProcessGroup, int)>& body,
                             std::chrono::milliseconds timeout = 20s) {
  std::vector<std::string> errors(hosts.size());
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        ProcessGroupOptions options;
        options.timeout = timeout;
        auto place = World::start(rank, static_cast<int>(hosts.size()), options);
        place.store = store;
        place.hosts = hosts;
        place.same_host = false;
        place.address = "127.0.0.1";
        auto transport = make_transport(place);
        body(ProcessGroup(
                 std::make_shared<ProcessGroup::Impl>(std::move(place), std::move(transport))),
             rank);
      } catch (const BrokenWorldError& error) {
        errors[rank] = "blames " + ::testing::PrintToString(error.ranks()) + ": " + error.what();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// Strangers who keep connections to each port that they learn open, and open each again that is
/// closed.
class Strangers {
 public:
  Strangers() : thread_([this] { run(); }) {}
  ~Strangers() {
    ends_ = true;
    thread_.join();
  }
  void come_to(int port, int count) {
    std::lock_guard lock(mutex_);
    for (int i = 0; i < count; ++i) kept_.push_back({port, connected(port)});
  }
  int closed() const { return closed_; }

 private:
  struct Kept {
    int port;
    Socket socket;
  };
  static Socket connected(int port) {
    try {
      return connect_to("127.0.0.1", port, Clock::now() + 5s);
    } catch (const std::exception&) {
      return {};  // the rank has ended
    }
  }
  void run() {
    for (; !ends_; std::this_thread::sleep_for(1ms)) {
      std::lock_guard lock(mutex_);
      for (auto& [port, socket] : kept_) {
        char byte;
        if (socket.fd() < 0 || ::recv(socket.fd(), &byte, 1, MSG_DONTWAIT) != 0) continue;
        ++closed_;
        socket = connected(port);
      }
    }
  }
  std::mutex mutex_;
  std::vector<Kept> kept_;
  std::atomic<bool> ends_ = false;
  std::atomic<int> closed_ = 0;
  std::thread thread_;
};

TEST(DisturbedPorts, IdleConnectionsToEveryNewPortKeepNoRankOut) {
  Strangers strangers;
  std::atomic<int> ports = 0;
  const auto store = c10::make_intrusive<PortStore>([&](const std::string&, int, int port) {
    ++ports;
    strangers.come_to(port, 80);
    return port;
  });
  constexpr int kSplits = 8;
  const auto errors = run({0, 0, 1, 1}, store, [&](ProcessGroup world, int rank) {
    for (int i = 0; i < kSplits; ++i) {
      auto half = world.split((rank + i) % 2).value();  // with a rank of each host, or of one
      auto others = world.split(rank % 2).value();
      for (auto* group : {&world, &half, &others}) {
        auto sum = at::ones({100'000});
        group->all_reduce(sum);
        EXPECT_TRUE(at::equal(sum, at::full({100'000}, group->size())));
      }
    }
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
  EXPECT_GE(ports, 4 * kSplits) << "strangers came to the ports of the groups";
  EXPECT_GT(strangers.closed(), 0) << "more than may stay";
}

TEST(DisturbedPorts, AStrangerWhoSaysNothingIsClosedAfterAWhile) {
  std::vector<Socket> kept;
  std::mutex mutex;
  const auto store = c10::make_intrusive<PortStore>([&](const std::string&, int, int port) {
    std::lock_guard lock(mutex);
    kept.push_back(connect_to("127.0.0.1", port, Clock::now() + 5s));
    return port;
  });
  const auto errors = run({0, 1}, store, [&](ProcessGroup world, int rank) {
    world.barrier();
    char byte;
    for (int i = 0; rank == 0 && i < 2; ++i) {
      ASSERT_TRUE(wait_for(kept.at(i), POLLIN, Clock::now() + 10s));
      EXPECT_LE(::recv(kept[i].fd(), &byte, 1, 0), 0);
    }
    world.barrier();
  });
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

/// Carries one connection to `port`, and flips a bit of byte `at` of what one side sends.
class Cable {
 public:
  Cable(int port, bool of_acceptor, int64_t at)
      : target_(port),
        of_acceptor_(of_acceptor),
        at_(at),
        listeners_(listen_at({"127.0.0.1"}, 0)),
        thread_([this] { run(); }) {}
  ~Cable() {
    ends_ = true;
    thread_.join();
  }
  int port() const { return port_of(listeners_[0]); }
  bool flipped() const { return flipped_; }

 private:
  struct Pair {
    Socket ends[2];  // of the rank that connects, and of the one that accepts
    int64_t carried[2] = {0, 0};
    bool closed = false;
  };

  void run() {
    std::vector<std::unique_ptr<Pair>> pairs;
    for (; !ends_; std::this_thread::sleep_for(200us)) {
      Socket socket(::accept4(listeners_[0].fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (socket.fd() >= 0) {
        pairs.push_back(std::make_unique<Pair>());
        pairs.back()->ends[0] = std::move(socket);
        pairs.back()->ends[1] = connect_to("127.0.0.1", target_, Clock::now() + 5s);
      }
      for (auto& pair : pairs)
        for (const int side : {0, 1})
          if (!pair->closed) carry(*pair, side);
    }
  }

  void carry(Pair& pair, int side) {
    std::vector<char> bytes(1 << 20);
    const auto got = ::recv(pair.ends[side].fd(), bytes.data(), bytes.size(), MSG_DONTWAIT);
    if (got < 0 && is_temporary(errno)) return;
    if (got <= 0) {
      pair.closed = true;
      for (auto& end : pair.ends) end = Socket();
      return;
    }
    auto& carried = pair.carried[side];
    if ((side == 1) == of_acceptor_ && at_ >= carried && at_ < carried + got && !flipped_) {
      bytes[at_ - carried] ^= 16;
      flipped_ = true;
    }
    carried += got;
    for (ssize_t done = 0; done < got && !ends_;) {
      const auto sent =
          ::send(pair.ends[1 - side].fd(), bytes.data() + done, got - done, MSG_NOSIGNAL);
      if (sent > 0) done += sent;
      else if (!is_temporary(errno)) return;
      else wait_for(pair.ends[1 - side], POLLOUT, Clock::now() + 100ms);
    }
  }

  const int target_;
  const bool of_acceptor_;
  const int64_t at_;
  std::vector<Socket> listeners_;
  std::atomic<bool> ends_ = false, flipped_ = false;
  std::thread thread_;
};

/// What each of the ranks on these hosts throws when a bit of the connection to rank 0 is flipped.
std::vector<std::string> errors_with_flip(const std::vector<int>& hosts, bool of_acceptor,
                                          int64_t at) {
  std::optional<Cable> cable;
  const auto store = c10::make_intrusive<PortStore>([&](const std::string& key, int, int port) {
    if (key != "tcp/all/0") return port;  // what rank 0 tells the others
    cable.emplace(port, of_acceptor, at);
    return cable->port();
  });
  const auto begun = Clock::now();
  auto errors = run(hosts, store, [&](ProcessGroup world, int) {
    for (int i = 0; i < 3; ++i) {
      auto sum = at::ones({1'000'000});
      world.all_reduce(sum);
      EXPECT_TRUE(at::equal(sum, at::full({1'000'000}, world.size()))) << "silently wrong";
    }
  });
  EXPECT_LT(Clock::now() - begun, 15s) << "nobody waits for the time-out";
  EXPECT_TRUE(cable && cable->flipped());
  return errors;
}

TEST(DisturbedPorts, AFlippedBitIsAnErrorThatNamesBothRanksOnEachOfThem) {
  for (const bool of_acceptor : {false, true}) {
    // In the head of the first message, in its data, far inside a large message.
    for (const int64_t at : {kGreetingBytes + 3, kGreetingBytes + 30, size_t{2'000'001}}) {
      const auto errors = errors_with_flip({0, 1}, of_acceptor, at);
      for (const auto& error : errors)
        EXPECT_THAT(error, AllOf(HasSubstr("blames { 0, 1 }"),
                                 HasSubstr("ranks 0 and 1 exchanged a message that was damaged on "
                                           "the way")))
            << of_acceptor << " " << at;
      EXPECT_THAT(errors[of_acceptor ? 1 : 0], HasSubstr("is wrong")) << "this rank finds it";
    }
  }
}

TEST(DisturbedPorts, TheOtherRanksOfTheHostsNameThoseBetweenWhichABitWasFlipped) {
  const auto errors = errors_with_flip({0, 0, 1, 1}, true, 1'000'001);
  std::set<std::string> blamed;
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("exchanged a message that was damaged on the way"));
    blamed.insert(error.substr(0, error.find(':')));
  }
  EXPECT_EQ(blamed.size(), 1u) << ::testing::PrintToString(errors);
}

TEST(DisturbedPorts, AFlippedBitInAGreetingCostsAnotherConnection) {
  for (const int64_t at : {3, 20, 41, 45, 50}) {
    const auto errors = errors_with_flip({0, 1}, false, at);
    for (const auto& error : errors) EXPECT_EQ(error, "") << at;
  }
}

}  // namespace
}  // namespace tessera::comm
