// Groups of a program's own communicator, as tessera/mpi.h makes them. tests/mpi has real ones.
#include <cstdlib>
#include <future>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/p2p/mailbox.h"
#include "harness/ranks.h"
#include "harness/thrown_by.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;

/// The exception of each rank that makes a group with `options(rank)` and then calls `body`.
std::vector<std::exception_ptr> start_ranks(
    int world, const std::function<ProcessGroupOptions(int rank)>& options, const RankBody& body,
    const std::string& refusal = "") {
  const auto communicators = ThreadCommunicator::make(world, refusal);
  std::vector<std::exception_ptr> errors(world);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(detail::init_process_group(communicators[rank], options(rank)), rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

void expect_sum(ProcessGroup group, int rank) {
  EXPECT_EQ(group.rank(), rank);
  auto sum = at::full({300001}, rank + 1);
  group.all_reduce(sum);
  EXPECT_EQ(sum[300000].item<int>(), group.size() * (group.size() + 1) / 2);
}

TEST(Communicator, ItsRanksStartWithoutTheLaunchersVariables) {
  for (const char* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR"}) ::setenv(name, "7", 1);
  for (const int world : {1, 2, 3, 4}) {
    const auto plain = [](int) { return ProcessGroupOptions(); };
    const auto errors = start_ranks(world, plain, [&](ProcessGroup group, int rank) {
      EXPECT_EQ(group.backend_name(), world == 1 ? "self" : "shm");
      EXPECT_EQ(group.local_size(), world);
      expect_sum(group, rank);
    });
    for (const auto& error : errors) EXPECT_EQ(message_of(error), "");
  }
  for (const char* const name : {"RANK", "WORLD_SIZE", "MASTER_ADDR"}) ::unsetenv(name);
}

TEST(Communicator, OptionsThatDifferAreAnErrorOnAllRanks) {
  const std::string where = "init_process_group: rank 1: ";
  const auto expect_error = [&](const std::function<void(ProcessGroupOptions&)>& change,
                                const std::string& wanted) {
    const auto options = [&](int rank) {
      ProcessGroupOptions mine;
      if (rank == 1) change(mine);
      return mine;
    };
    for (const auto& error : start_ranks(3, options, [](ProcessGroup, int) {}))
      EXPECT_THAT(message_of(error), HasSubstr(where + wanted));
  };
  using Options = ProcessGroupOptions;
  expect_error([](Options& mine) { mine.timeout = std::chrono::seconds(5); },
               "timeout is 5000 ms, and on rank 0 timeout is 60000 ms; expected the same");
  expect_error([](Options& mine) { mine.timeout = std::chrono::seconds(0); },
               "timeout is 0 ms; expected a positive one");
  expect_error([](Options& mine) { mine.backend = Backend::TCP; },
               "backend is TCP, and on rank 0 backend is Auto; expected the same");
  expect_error([](Options& mine) { mine.check_results = true; },
               "check_results is true, and on rank 0 check_results is false");
}

TEST(Communicator, ItCarriesTheMessagesIfAnyThreadMayCallIt) {
  const auto options = [](int) {
    ProcessGroupOptions mine;
    mine.backend = Backend::MPI;
    return mine;
  };
  for (const std::string refusal : {"", "it says so"}) {
    const auto body = [&](ProcessGroup group, int rank) {
      EXPECT_EQ(group.backend_name(), refusal.empty() ? "mpi" : "shm");
      expect_sum(group, rank);
      expect_sum(group.duplicate(), rank);
    };
    for (const auto& error : start_ranks(3, options, body, refusal))
      EXPECT_EQ(message_of(error), "");
  }
}

/// As where MPI was measured faster than the networks. Backend::MPI uses it within a host, too.
TEST(Communicator, ItCarriesMessagesBetweenHostsAlone) {
  const std::vector<int> hosts{0, 0, 2, 2};
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto communicators = ThreadCommunicator::make(4);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      auto world = comm::World::start(rank, 4, {.timeout = std::chrono::seconds(20)});
      world.store = store;
      world.hosts = hosts;
      world.same_host = false;
      world.start_group.communicator = communicators[rank];
      auto transport = comm::make_transport(world);
      ProcessGroup group(
          std::make_shared<ProcessGroup::Impl>(std::move(world), std::move(transport)));
      EXPECT_EQ(group.backend_name(), "mpi");
      expect_sum(group, rank);
      EXPECT_EQ(group.split(rank / 2)->backend_name(), "shm");
      EXPECT_EQ(group.split(rank % 2)->backend_name(), "mpi");
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Communicator, AMessageArrivesWhileItsSenderDoesOtherThings) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto communicators = ThreadCommunicator::make(2);
  const auto mailbox_of = [&](int rank) {
    auto world = comm::World::start(rank, 2, {});
    world.store = store;
    world.start_group.communicator = communicators[rank];
    return comm::make_communicator_mailbox(world);
  };
  std::promise<std::string> arrived;
  std::thread receiver([&] {
    const auto mailbox = mailbox_of(1);
    auto tensor = at::zeros({1000});
    const auto message = mailbox->receive(tensor, 0, 5);
    std::string problem;
    try {
      message->wait(std::chrono::seconds(5));
    } catch (const std::exception& error) {
      problem = error.what();
    }
    EXPECT_EQ(tensor.sum().item<float>(), 1000);
    arrived.set_value(problem);
  });
  const auto mailbox = mailbox_of(0);
  const auto message = mailbox->send(at::ones({1000}), 1, 5);
  EXPECT_EQ(arrived.get_future().get(), "");  // the sender waits for another rank of its host
  message->wait(std::chrono::seconds(5));
  receiver.join();
}

TEST(Communicator, BackendMpiWithoutOneIsAnError) {
  for (const auto& hosts : {std::vector<int>{}, {0, 1}}) {
    auto world = comm::World::start(1, 2, {.backend = Backend::MPI});
    world.hosts = hosts;
    world.same_host = comm::all_equal(hosts);
    EXPECT_THAT(thrown_by([&] { comm::make_transport(world); }),
                HasSubstr("rank 1: backend is MPI, and this world was not made of a communicator"));
  }
}

}  // namespace
}  // namespace tessera::testing
