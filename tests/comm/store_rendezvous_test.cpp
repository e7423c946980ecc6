#include "comm/rendezvous/store_rendezvous.h"

#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "child.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace {

using namespace std::chrono_literals;
using tessera::comm::LaunchEnvironment;
using tessera::comm::rendezvous_over_store;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// A fresh folder, removed at the end.
class Folder {
 public:
  Folder() { path_ = ::mkdtemp(path_.data()); }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = (std::filesystem::temp_directory_path() / "rendezvous.XXXXXX").string();
};

LaunchEnvironment in_folder(int rank, int size, const std::string& folder) {
  LaunchEnvironment environment;
  environment.rank = rank;
  environment.size = size;
  environment.rendezvous = folder;
  return environment;
}

std::string error_of(const LaunchEnvironment& environment,
                     std::chrono::milliseconds timeout = 10s) {
  try {
    rendezvous_over_store(environment, timeout);
    return "no error";
  } catch (const tessera::Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not one of ours: ") + error.what();
  }
}

TEST(StoreRendezvous, AMissingFolderAndAFileInItsPlaceAreErrors) {
  EXPECT_THAT(error_of(in_folder(0, 2, "/dev/null")),
              HasSubstr("rank 0: the rendezvous folder /dev/null cannot be used: Not a directory"));
  EXPECT_THAT(error_of(in_folder(1, 2, "/nowhere/at/all")),
              HasSubstr("rank 1: the rendezvous folder /nowhere/at/all cannot be used: No such "
                        "file or directory"));
}

TEST(StoreRendezvous, AFolderOnAFullDiskIsAnErrorThatNamesIt) {
  const Folder folder;
  const auto status = tessera::testing::Child([&] {
                        ::signal(SIGXFSZ, SIG_IGN);
                        const rlimit none{0, 0};  // as on a full file system, but another errno
                        ::setrlimit(RLIMIT_FSIZE, &none);
                        const auto text = error_of(in_folder(1, 2, folder.path()));
                        const bool right =
                            text.find("rank 1 of 2") != std::string::npos &&
                            text.find(folder.path() + "/store") != std::string::npos &&
                            text.find("File too large") != std::string::npos;
                        if (!right) ::write(2, text.data(), text.size());
                        ::_exit(right && !text.starts_with("not") ? 7 : 1);
                      }).wait();
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

/// The errors of these ranks when all start at once.
std::vector<std::string> errors_of(const std::vector<LaunchEnvironment>& environments,
                                   std::chrono::milliseconds timeout = 10s) {
  std::vector<std::string> errors(environments.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < errors.size(); ++i)
    threads.emplace_back([&, i] { errors[i] = error_of(environments[i], timeout); });
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(StoreRendezvous, RanksWithDifferentWorldSizesAreAnErrorThatNamesBoth) {
  const Folder folder;
  const auto errors = errors_of({in_folder(0, 2, folder.path()), in_folder(1, 3, folder.path()),
                                 in_folder(2, 3, folder.path())});
  EXPECT_THAT(errors[0],
              HasSubstr("rank 0: WORLD_SIZE is 2 here and 3 on rank 1; expected the same"));
  EXPECT_THAT(errors[1],
              HasSubstr("rank 1: WORLD_SIZE is 3 here and 2 on rank 0; expected the same"));
  EXPECT_THAT(errors[2],
              HasSubstr("rank 2: WORLD_SIZE is 3 here and 2 on rank 0; expected the same"));
}

LaunchEnvironment through_the_launchers_store(int rank, int port) {
  LaunchEnvironment environment;
  environment.rank = rank;
  environment.size = 2;
  environment.local_size = 1;
  environment.master_address = "127.0.0.1";
  environment.master_port = port;
  environment.agent_store = true;
  return environment;
}

TEST(StoreRendezvous, RanksOfSeveralHostsUseTheLaunchersStore) {
  auto options = tessera::compat::without_libuv(c10d::TCPStoreOptions());
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore store("127.0.0.1", options);
  const int port = store.getPort();
  EXPECT_THAT(
      errors_of({through_the_launchers_store(0, port), through_the_launchers_store(1, port)}),
      ElementsAre("no error", "no error"));
  EXPECT_THAT(error_of(
                  [&] {
                    auto late = through_the_launchers_store(0, port);
                    late.attempt = 1;
                    return late;
                  }(),
                  300ms),
              HasSubstr("rank 1 did not arrive within 300 ms"));
}

/// A loopback port on which no process listens while this is alive.
class DeafPort {
 public:
  DeafPort() {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_TRUE(::bind(socket_, any, size) == 0 && ::getsockname(socket_, any, &size) == 0);
    number_ = ntohs(address.sin_port);
  }
  ~DeafPort() { ::close(socket_); }
  int number() const { return number_; }

 private:
  int socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), number_ = 0;
};

TEST(StoreRendezvous, UnderTorchrunOnOneHostTheAgentsStoreIsNotUsed) {
  const DeafPort port;
  const auto ranks = [&](int attempt, const std::string& run) {
    std::vector<LaunchEnvironment> both{through_the_launchers_store(0, port.number()),
                                        through_the_launchers_store(1, port.number())};
    for (auto& environment : both) {
      environment.local_size = 2;
      environment.attempt = attempt;
      environment.run = run;
    }
    return both;
  };
  // A completed rendezvous keeps its folder until this process ends.
  EXPECT_THAT(errors_of(ranks(0, "one")), Each("no error"));
  EXPECT_THAT(errors_of(ranks(1, "one")), Each("no error")) << "the ranks start again";
  EXPECT_THAT(errors_of(ranks(0, "a/n other " + std::string(300, 'x'))), Each("no error"));
  EXPECT_THAT(errors_of(ranks(0, "one")), Each("no error")) << "another world of these ranks";
  const auto other_run = "another run on this host already uses port-" +
                         std::to_string(port.number()) + "-attempt-0-one";
  const auto status = tessera::testing::Child([&] {
                        const auto text = error_of(ranks(0, "one")[0], 100ms);
                        if (text.find(other_run) == std::string::npos)
                          ::write(2, text.data(), text.size());
                        else ::_exit(7);
                      }).wait();
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

/// A service that is not a store and handles each connection with the given function.
class Service {
 public:
  explicit Service(std::function<void(int connection)> treat)
      : treat_(std::move(treat)), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_TRUE(::bind(listener_, any, size) == 0 && ::listen(listener_, 9) == 0 &&
                ::getsockname(listener_, any, &size) == 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { serve(); });
  }
  ~Service() {
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    for (const int fd : connections_) ::close(fd);
    ::close(listener_);
  }
  int port() const { return port_; }

 private:
  void serve() {
    for (int fd; (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      connections_.push_back(fd);
      treat_(fd);
    }
  }

  std::function<void(int)> treat_;
  int listener_, port_ = 0;
  std::vector<int> connections_;
  std::thread thread_;
};

/// The errors of two ranks that use the service as a store. Both must fail soon and name it.
std::vector<std::string> errors_about(const Service& service) {
  const auto start = std::chrono::steady_clock::now();
  auto errors = errors_of({through_the_launchers_store(0, service.port()),
                           through_the_launchers_store(1, service.port())},
                          500ms);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 4s);
  for (int rank : {0, 1}) {
    EXPECT_THAT(errors[rank],
                HasSubstr("init_process_group: rank " + std::to_string(rank) +
                          " of 2 could not use the store at MASTER_ADDR:MASTER_PORT = 127.0.0.1:" +
                          std::to_string(service.port()) + " within 500 ms: "));
    EXPECT_THAT(errors[rank],
                HasSubstr("another service, or the torchrun of another PyTorch, may answer there"));
  }
  return errors;
}

constexpr char kRefusal[] = "HTTP/1.1 400 Bad Request\r\n\r\n";

TEST(StoreRendezvous, AServiceThatNeverAnswersIsAnErrorAtTheTimeOut) {
  const Service silent([](int) {});
  EXPECT_THAT(errors_about(silent), Each(HasSubstr("it does not answer")));
}

TEST(StoreRendezvous, AServiceWithAnotherProtocolIsAnError) {
  const Service http([](int fd) {
    char request[8];
    const timeval briefly{0, 200'000};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &briefly, sizeof briefly);
    if (::recv(fd, request, sizeof request, 0) > 0)
      ::send(fd, kRefusal, sizeof kRefusal, MSG_NOSIGNAL);
  });
  errors_about(http);
}

TEST(StoreRendezvous, AServiceThatSendsFirstOrClosesTheConnectionIsAnError) {
  const Service banner([](int fd) { ::send(fd, kRefusal, sizeof kRefusal, MSG_NOSIGNAL); });
  EXPECT_THAT(errors_about(banner), Each(HasSubstr("sends data before a request")));
  const Service closing([](int fd) { ::shutdown(fd, SHUT_RDWR); });
  EXPECT_THAT(errors_about(closing), Each(HasSubstr("closes the connection")));
}

}  // namespace
