// The store over real sockets on loopback: ranks, junk, other services, the end of rank 0.
#include "comm/store/store_server.h"

#include <ctime>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "child.h"
#include "comm/rendezvous/own_store.h"
#include "comm/store/verified_store.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace {

using namespace std::chrono_literals;
using namespace tessera::comm;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

/// What a call throws, as "broken world [ranks]: message"; "no error" if nothing.
template <class Body>
std::string error_from(Body body) {
  try {
    body();
    return "no error";
  } catch (const tessera::BrokenWorldError& error) {
    return "broken world " + ::testing::PrintToString(error.ranks()) + ": " + error.what();
  } catch (const tessera::UsageError& error) {
    return std::string("usage: ") + error.what();
  } catch (const std::exception& error) {
    return std::string("other: ") + error.what();
  }
}

/// A store on a free loopback port, and its ranks.
class Served {
 public:
  explicit Served(std::string secret = "secret", int attempt = 7,
                  std::chrono::milliseconds handshake_limit = 1000ms, int port = 0) {
    auto listeners = listen_at({"127.0.0.1"}, port);
    port_ = port_of(listeners[0]);
    server_ = std::make_shared<StoreServer>(
        std::move(listeners), StoreServer::Options{.gate = {attempt, std::move(secret)},
                                                   .handshake_limit = handshake_limit});
  }
  int port() const { return port_; }
  StoreServer& server() { return *server_; }
  void end() { server_.reset(); }
  c10::intrusive_ptr<VerifiedStore> rank(int rank, std::chrono::milliseconds timeout = 10s,
                                         const std::string& secret = "secret", int attempt = 7) {
    return c10::make_intrusive<VerifiedStore>(
        StorePlace{"127.0.0.1", port_, rank, 4, attempt, secret}, timeout, nullptr);
  }

 private:
  int port_;
  std::shared_ptr<StoreServer> server_;
};

Socket connection(int port) { return connect_to("127.0.0.1", port, Clock::now() + 5s); }

void send(const Socket& socket, const std::string& sent) {
  (void)!::send(socket.fd(), sent.data(), sent.size(), MSG_NOSIGNAL);
}

/// Everything that the store sends until it has `most` bytes or the store closes the connection.
/// Fails if neither happens within 5 s.
std::string receive(const Socket& socket, size_t most = 1000) {
  std::string all(most, '\0');
  size_t size = 0;
  while (size < most) {
    if (!wait_for(socket, POLLIN, Clock::now() + 5s)) {
      ADD_FAILURE() << "the store neither answers nor closes the connection";
      break;
    }
    const auto got = ::recv(socket.fd(), all.data() + size, most - size, 0);
    if (got <= 0) break;
    size += static_cast<size_t>(got);
  }
  all.resize(size);
  return all;
}

/// Keeps this many connections open and sends `words` on each. Opens a new one for each that the
/// store closes.
class Junk {
 public:
  Junk(int port, size_t count, std::string words) {
    for (size_t i = 0; i < count; ++i) add(port, words);
    thread_ = std::thread([=, this] {
      for (; !ends_; std::this_thread::sleep_for(5ms)) {
        for (auto& socket : open_) {
          char answer[100];
          const bool closed = wait_for(socket, POLLIN, Clock::now()) &&
                              ::recv(socket.fd(), answer, sizeof answer, 0) <= 0;
          if (!closed) continue;
          ++closed_;
          socket = connection(port);
          send(socket, words);
        }
      }
    });
  }
  ~Junk() {
    ends_ = true;
    thread_.join();
  }
  int closed() const { return closed_; }

 private:
  void add(int port, const std::string& words) {
    open_.push_back(connection(port));
    send(open_.back(), words);
  }

  std::vector<Socket> open_;
  std::atomic<bool> ends_ = false;
  std::atomic<int> closed_ = 0;
  std::thread thread_;
};

/// True if `condition` becomes true within 5 s.
bool soon(const std::function<bool()>& condition) {
  for (const auto end = Clock::now() + 5s; Clock::now() < end; std::this_thread::sleep_for(5ms))
    if (condition()) return true;
  return false;
}

TEST(StoreServer, RanksShareKeys) {
  Served served;
  const auto one = served.rank(1), two = served.rank(2);
  one->set("a", bytes("x"));
  EXPECT_EQ(text(two->get("a")), "x");
  two->set("empty", {});
  EXPECT_EQ(text(one->get("empty")), "");
  const std::string binary("\0\xff\n", 3);
  two->set("binary", bytes(binary));
  EXPECT_EQ(text(one->get("binary")), binary);
  EXPECT_EQ(one->add("n", 5), 5);
  EXPECT_EQ(two->add("n", -7), -2);
  EXPECT_TRUE(two->check({"a", "n"}));
  EXPECT_FALSE(two->check({"a", "b"}));
  EXPECT_EQ(text(one->compareSet("a", bytes("y"), bytes("z"))), "x");
  EXPECT_EQ(text(one->compareSet("a", bytes("x"), bytes("z"))), "z");
  EXPECT_EQ(two->getNumKeys(), 4);
  EXPECT_TRUE(two->deleteKey("a"));
  EXPECT_FALSE(one->deleteKey("a"));
  EXPECT_EQ(text(two->clone()->get("n")), "-2");
  EXPECT_THAT(error_from([&] { one->add("binary", 1); }),
              HasSubstr("usage: the store refuses a request of rank 1: add"));
  const std::string large(3'000'000, 'x');
  one->set("large", bytes(large));
  EXPECT_EQ(text(two->get("large")), large);
}

TEST(StoreServer, ACallWaitsForItsKeysAndOthersDoNotWaitForIt) {
  Served served;
  const auto one = served.rank(1), two = served.rank(2);
  auto got = std::async(std::launch::async, [&] { return text(one->get("late")); });
  auto waited = std::async(std::launch::async, [&] { one->wait({"late", "later"}, 10s); });
  std::this_thread::sleep_for(50ms);
  one->set("own", bytes("x"));  // the same store, while two of its calls wait
  EXPECT_TRUE(two->check({"own"}));
  two->set("late", bytes("here"));
  EXPECT_EQ(got.get(), "here");
  EXPECT_EQ(waited.wait_for(50ms), std::future_status::timeout);
  two->set("later", bytes("x"));
  EXPECT_EQ(error_from([&] { waited.get(); }), "no error");
}

TEST(StoreServer, AKeyThatDoesNotAppearInTimeIsAnError) {
  Served served;
  const auto one = served.rank(1, 200ms);
  EXPECT_THAT(error_from([&] { one->wait({"k"}, 100ms); }),
              HasSubstr("broken world {}: rank 1 of 4 waited 100 ms for the store at 127.0.0.1:"));
  EXPECT_THAT(error_from([&] { one->get("k"); }), HasSubstr("waited 200 ms"));
  one->setTimeout(100ms);
  EXPECT_THAT(error_from([&] { one->wait({"k"}); }), HasSubstr("waited 100 ms"));
  one->set("k", bytes("x"));
  EXPECT_EQ(text(one->get("k")), "x") << "it works further on";
}

TEST(StoreServer, ManyThreadsCountTogether) {
  Served served;
  const auto one = served.rank(1), two = served.rank(2);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i)
    threads.emplace_back([&, store = i % 2 ? one : two] {
      for (int k = 0; k < 100; ++k) store->add("n", 1);
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(one->add("n", 0), 800);
}

TEST(StoreServer, ItsEndIsAnErrorAtOnceThatNamesRank0) {
  Served served;
  const auto one = served.rank(1, 20s), two = served.rank(2, 20s);
  auto waiting = std::async(std::launch::async,
                            [&] { return error_from([&] { one->wait({"never"}, 20s); }); });
  std::this_thread::sleep_for(50ms);
  const auto start = Clock::now();
  served.end();
  EXPECT_THAT(waiting.get(),
              HasSubstr("broken world { 0 }: rank 1 of 4 lost the store of rank 0 at 127.0.0.1:"));
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(error_from([&] { two->set("k", bytes("v")); }), HasSubstr("broken world { 0 }"));
    EXPECT_THAT(error_from([&] { one->check({"k"}); }), HasSubstr("broken world { 0 }"));
  }
  EXPECT_LT(Clock::now() - start, 3s);
}

TEST(StoreServer, TheThreadTakesNoSignalsOfTheProgram) {
  const auto status = tessera::testing::Child([] {
                        Served served;
                        sigset_t set;
                        ::sigemptyset(&set);
                        ::sigaddset(&set, SIGUSR1);
                        ::pthread_sigmask(SIG_BLOCK, &set, nullptr);
                        served.rank(1)->add("n", 1);  // the thread runs
                        ::kill(::getpid(), SIGUSR1);
                        const timespec limit{5, 0};
                        ::_exit(::sigtimedwait(&set, nullptr, &limit) == SIGUSR1 ? 7 : 1);
                      }).wait();
  EXPECT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

TEST(StoreServer, ListensOnItsAddressAlone) {
  auto listeners = listen_at({"127.0.0.2"}, 0);
  const int port = port_of(listeners[0]);
  const StoreServer server(std::move(listeners), {});
  EXPECT_NO_THROW(connect_to("127.0.0.2", port, Clock::now() + 5s));
  EXPECT_THROW(connect_to("127.0.0.1", port, Clock::now() + 5s), std::system_error);
}

TEST(StoreServer, AnAddressOfAnotherHostIsAnErrorUnlessThereIsOneOfThisHost) {
  EXPECT_THROW(listen_at({"192.0.2.77"}, 0), std::system_error);
  EXPECT_EQ(listen_at({"192.0.2.77", "127.0.0.1"}, 0).size(), 1);
  const auto taken = listen_at({"127.0.0.1"}, 0);
  EXPECT_THROW(listen_at({"192.0.2.77", "127.0.0.1"}, port_of(taken[0])), std::system_error);
}

TEST(StoreServer, JunkIsDisconnectedAndRanksAreServed) {
  Served served;
  using namespace std::string_literals;
  for (const auto& junk : {"\0"s, "\xff\xff\xff\xff\xff\xff\xff\xff"s,
                           "GET / HTTP/1.1\r\nHost: x\r\n\r\n"s, std::string(100'000, 'x')}) {
    const auto socket = connection(served.port());
    send(socket, junk);
    EXPECT_EQ(receive(socket), "");
    EXPECT_EQ(served.rank(1)->add("n", 0), 0);
  }
  EXPECT_THAT(served.server().reported(), IsEmpty());
}

TEST(StoreServer, AConnectionThatProvesNothingInTimeIsClosed) {
  Served served;
  const auto silent = connection(served.port()), half = connection(served.port()),
             greeted = connection(served.port());
  const auto hello = make_hello({1, 7, true});
  send(half, hello.substr(0, 10));
  send(greeted, hello);
  const auto start = Clock::now();
  EXPECT_EQ(receive(silent), "");
  EXPECT_EQ(receive(half), "");
  EXPECT_EQ(receive(greeted).size(), kChallengeBytes);
  EXPECT_GT(Clock::now() - start, 500ms) << "the time limit has closed them";
}

TEST(StoreServer, AReplayedProofIsRefused) {
  Served served;
  const auto hello = make_hello({1, 7, true});
  const auto first = connection(served.port());
  send(first, hello);
  const auto proof = make_proof("secret", hello, receive(first, kChallengeBytes));
  send(first, proof);
  EXPECT_EQ(receive(first, 1), std::string(1, kWelcome));
  const auto second = connection(served.port());
  send(second, hello);
  EXPECT_EQ(receive(second, kChallengeBytes).size(), kChallengeBytes);
  send(second, proof);
  EXPECT_EQ(receive(second, 1), std::string(1, kRefusal));
}

TEST(StoreServer, AHugeRequestOfAMemberEndsItsConnectionAlone) {
  Served served;
  const auto other = served.rank(2);
  const auto hello = make_hello({1, 7, true});
  const auto socket = connection(served.port());
  send(socket, hello);
  send(socket, make_proof("secret", hello, receive(socket, kChallengeBytes)));
  EXPECT_EQ(receive(socket, kVerdictBytes)[0], kWelcome);
  send(socket, "\xff\xff\xff\xff\1\1\1\1");
  EXPECT_EQ(receive(socket), "");
  EXPECT_EQ(other->add("n", 1), 1);
}

TEST(StoreServer, HundredsOfOpenConnectionsDoNotKeepRanksOut) {
  using namespace std::string_literals;
  const auto hello = make_hello({1, 7, true});
  for (const auto& words : {""s, hello.substr(0, 30), hello}) {
    Served served("secret", 7, 60s);
    const Junk junk(served.port(), 300, words);
    const auto start = Clock::now();
    for (int rank = 0; rank < 4; ++rank) served.rank(rank)->add("n", 1);
    EXPECT_EQ(served.rank(0)->add("n", 0), 4);
    EXPECT_LT(Clock::now() - start, 5s);
    EXPECT_TRUE(soon([&] { return junk.closed() > 200; })) << "those above the limit are closed";
  }
}

TEST(StoreServer, ConnectionsWithoutAHelloGoFirst) {
  auto listeners = listen_at({"127.0.0.1"}, 0);
  const int port = port_of(listeners[0]);
  const StoreServer server(std::move(listeners),
                           {.gate = {7, "secret"}, .handshake_limit = 60s, .most_strangers = 4});
  const auto hello = make_hello({1, 7, true});
  const auto rank = connection(port);
  send(rank, hello);
  const auto challenge = receive(rank, kChallengeBytes);
  std::vector<Socket> junk;
  for (int i = 0; i < 10; ++i) junk.push_back(connection(port));
  EXPECT_EQ(receive(junk[5]), "");
  send(rank, make_proof("secret", hello, challenge));
  EXPECT_EQ(receive(rank, 1), std::string(1, kWelcome));
}

TEST(StoreServer, JunkThatSaysHelloDoesNotKeepOutARankWhoseHelloIsOnTheWay) {
  Served served("secret", 7, 60s);
  const auto hello = make_hello({1, 7, true});
  std::vector<Socket> junk;
  for (int i = 0; i < 64; ++i) {
    junk.push_back(connection(served.port()));
    send(junk.back(), hello);
    ASSERT_EQ(receive(junk.back(), kChallengeBytes).size(), kChallengeBytes);
  }
  const auto rank = connection(served.port());
  std::this_thread::sleep_for(100ms);  // the way is long
  send(rank, hello);
  const auto challenge = receive(rank, kChallengeBytes);
  ASSERT_EQ(challenge.size(), kChallengeBytes);
  send(rank, make_proof("secret", hello, challenge));
  EXPECT_EQ(receive(rank, 1), std::string(1, kWelcome));
}

TEST(StoreServer, TooFewFilesForTheJunkDoNotKeepRanksOut) {
  auto listeners = listen_at({"127.0.0.1"}, 0);
  const int port = port_of(listeners[0]);
  const tessera::testing::Child server([&] {
    const rlimit few{static_cast<rlim_t>(::dup(0)) + 20, 100};
    ::setrlimit(RLIMIT_NOFILE, &few);
    const StoreServer own(std::move(listeners), {.gate = {7, "secret"}});
    ::pause();
  });
  { const auto closed_here = std::move(listeners); }
  const Junk junk(port, 100, "");
  const StorePlace place{"127.0.0.1", port, 1, 4, 7, "secret"};
  EXPECT_EQ(c10::make_intrusive<VerifiedStore>(place, 10s, nullptr)->add("n", 1), 1);
}

TEST(StoreServer, AnotherSecretIsAnErrorOnBothSidesAtOnceAndHarmsNoOther) {
  const auto both = [](const std::string& theirs, const std::string& mine) {
    Served served(theirs);
    const auto start = Clock::now();
    auto errors = error_from([&] { served.rank(3, 20s, mine); }) + "\n";
    EXPECT_LT(Clock::now() - start, 3s);
    served.rank(1, 10s, theirs)->set("k", bytes("v"));
    EXPECT_TRUE(soon([&] { return !served.server().reported().empty(); }));
    for (const auto& line : served.server().reported()) errors += line;
    EXPECT_THAT(errors, Not(HasSubstr("hidden")));
    return errors;
  };
  EXPECT_THAT(
      both("hidden a", "hidden b"),
      AllOf(HasSubstr("usage: init_process_group: rank 3 on host "),
            HasSubstr("rank 0 has another secret"), HasSubstr("set the same TESSERA_SECRET"),
            HasSubstr("refused a connection from 127.0.0.1: it calls itself rank 3 and "
                      "has another secret than rank 0; set the same TESSERA_SECRET")));
  EXPECT_THAT(both("hidden a", ""), AllOf(HasSubstr("rank 0 has a secret and this rank none"),
                                          HasSubstr("has no secret, and rank 0 has one")));
  EXPECT_THAT(both("", "hidden b"), AllOf(HasSubstr("this rank has a secret and rank 0 none"),
                                          HasSubstr("has a secret, and rank 0 has none")));
}

TEST(StoreServer, RanksOfAnotherAttemptAreNotServed) {
  Served served("secret", 2);
  EXPECT_THAT(error_from([&] { served.rank(3, 20s, "secret", 1); }),
              HasSubstr("usage: init_process_group: rank 3 on host "));
  EXPECT_TRUE(soon([&] { return !served.server().reported().empty(); }));
  EXPECT_THAT(served.server().reported(),
              ElementsAre(HasSubstr("belongs to attempt 1; expected attempt 2")));
  EXPECT_THAT(error_from([&] { served.rank(3, 300ms, "secret", 3); }),
              HasSubstr("it belongs to attempt 2, and this rank to attempt 3"));
}

TEST(StoreServer, TheNextAttemptUsesThePortAtOnce) {
  Served first("secret", 1);
  const auto before = first.rank(1, 10s, "secret", 1);
  before->add("n", 1);
  auto early =
      std::async(std::launch::async, [&] { return first.rank(1, 10s, "secret", 2)->add("n", 1); });
  std::this_thread::sleep_for(100ms);
  first.end();
  const Served second("secret", 2, 1000ms, first.port());
  EXPECT_EQ(early.get(), 1) << "the keys of the first attempt are gone";
  EXPECT_THAT(error_from([&] { before->add("n", 1); }), HasSubstr("broken world { 0 }"));
}

TEST(StoreServer, ARankThatIsAheadWaitsForTheStoreOfItsOwnWorld) {
  auto listeners = listen_at({"127.0.0.1"}, 0);
  const int port = port_of(listeners[0]);
  auto server = std::make_unique<StoreServer>(std::move(listeners),
                                              StoreServer::Options{.gate = {7, "secret"}});
  const auto rank = [&](int world, std::chrono::milliseconds timeout = 10s) {
    return c10::make_intrusive<VerifiedStore>(
        StorePlace{"127.0.0.1", port, 1, 4, 7, "secret", {}, world}, timeout, nullptr);
  };
  rank(0)->set("k", bytes("of the first world"));
  EXPECT_THAT(
      error_from([&] { rank(1, 300ms); }),
      HasSubstr("rank 0 has not left its world number 1, and this rank makes its number 2"));
  auto ahead = std::async(std::launch::async, [&] { return rank(1)->check({"k"}); });
  EXPECT_EQ(ahead.wait_for(200ms), std::future_status::timeout);
  EXPECT_THAT(server->reported(), IsEmpty()) << "it is no fault to be early";
  server.reset();
  server = std::make_unique<StoreServer>(listen_at({"127.0.0.1"}, port),
                                         StoreServer::Options{.gate = {7, "secret", "rank", 1}});
  EXPECT_FALSE(ahead.get()) << "the keys are those of the second world";
  EXPECT_THAT(error_from([&] { rank(0); }),
              AllOf(HasSubstr("usage: init_process_group: rank 1 on host "),
                    HasSubstr("makes its world number 1, and rank 0 its number 2; expected as many "
                              "successful calls before this one on every rank")));
}

TEST(StoreServer, ARankWaitsForAStoreThatStartsLater) {
  auto listeners = listen_at({"127.0.0.1"}, 0);
  const int port = port_of(listeners[0]);
  listeners.clear();
  const StorePlace place{"127.0.0.1", port, 1, 4, 7, "secret"};
  auto early = std::async(std::launch::async, [&] {
    return c10::make_intrusive<VerifiedStore>(place, 10s, nullptr)->add("n", 1);
  });
  std::this_thread::sleep_for(200ms);
  const StoreServer server(listen_at({"127.0.0.1"}, port), {.gate = {7, "secret"}});
  EXPECT_EQ(early.get(), 1);
}

LaunchEnvironment rank_at(int rank, const std::string& address, int port) {
  LaunchEnvironment environment;
  environment.rank = rank;
  environment.size = 2;
  environment.master_address = address;
  environment.master_port = port;
  return environment;
}

std::string error_of(const LaunchEnvironment& environment) {
  return error_from([&] { own_store(environment, 500ms); });
}

/// Accepts connections, sends `banner` and what the client has sent before `reply`, or closes them.
class OtherService {
 public:
  OtherService(std::string banner, std::string reply, bool closes)
      : listeners_(listen_at({"127.0.0.1"}, 0)), thread_([=, this] {
          for (; !ends_; std::this_thread::sleep_for(2ms)) {
            Socket socket(::accept4(listeners_[0].fd(), nullptr, nullptr, SOCK_CLOEXEC));
            if (socket.fd() < 0) continue;
            send(socket, banner);
            char request[8];
            if (!reply.empty() && ::recv(socket.fd(), request, sizeof request, 0) > 0)
              send(socket, reply);
            if (!closes) kept_.push_back(std::move(socket));
          }
        }) {}
  ~OtherService() {
    ends_ = true;
    thread_.join();
  }
  int port() const { return port_of(listeners_[0]); }

 private:
  std::vector<Socket> listeners_, kept_;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

TEST(OwnStore, AnotherServiceIsAnErrorSoonAfterTheTimeOut) {
  const auto error_with = [](const OtherService& service) {
    const auto start = Clock::now();
    auto error = error_of(rank_at(1, "127.0.0.1", service.port()));
    EXPECT_LT(Clock::now() - start, 3s);
    EXPECT_THAT(error, HasSubstr("broken world { 0 }: init_process_group: rank 1 of 2 could not "
                                 "use the store at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" +
                                 std::to_string(service.port()) + " within 500 ms: "));
    EXPECT_THAT(error, HasSubstr("another service may answer there"));
    return error;
  };
  EXPECT_THAT(error_with({"", "", false}), HasSubstr("it does not answer"));
  EXPECT_THAT(error_with({"SSH-2.0-OpenSSH\r\n", "", false}), HasSubstr("another protocol"));
  EXPECT_THAT(error_with({"", "HTTP/1.1 400 Bad Request\r\n\r\n", true}),
              HasSubstr("another protocol"));
  error_with({"", "", true});
}

TEST(OwnStore, AStoreOfC10dIsAnErrorToo) {
  auto options = tessera::compat::without_libuv(c10d::TCPStoreOptions());
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
  EXPECT_THAT(error_of(rank_at(1, "127.0.0.1", store.getPort())),
              HasSubstr("could not use the store"));
}

TEST(OwnStore, APortWithoutAStoreIsAnErrorAtTheTimeOut) {
  auto listeners = listen_at({"127.0.0.1"}, 0);
  const int port = port_of(listeners[0]);
  listeners.clear();
  EXPECT_THAT(error_of(rank_at(1, "127.0.0.1", port)), HasSubstr("Connection refused"));
}

TEST(OwnStore, AnAddressOnWhichRank0CannotListenIsAnErrorThatNamesIt) {
  EXPECT_THAT(error_of(rank_at(0, "192.0.2.77", 29999)),
              AllOf(HasSubstr("usage: init_process_group: rank 0 cannot serve the store at "
                              "MASTER_ADDR:MASTER_PORT = 192.0.2.77:29999"),
                    HasSubstr("of an interface of the host of rank 0")));
  EXPECT_THAT(error_of(rank_at(0, "0.0.0.0", 29999)), HasSubstr("MASTER_ADDR is '0.0.0.0'"));
  const auto taken = listen_at({"127.0.0.1"}, 0);
  EXPECT_THAT(error_of(rank_at(0, "127.0.0.1", port_of(taken[0]))),
              AllOf(HasSubstr("in use"), HasSubstr("expected a free port")));
}

}  // namespace
