#pragma once

#include <exception>
#include <functional>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "harness/thread_communicator.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::testing {

using RankBody = std::function<void(ProcessGroup group, int rank)>;

/// Runs `body` on `world` threads, each of which is a rank of one group. Returns the exception of
/// each rank, null for a rank that did not throw. A rank that throws releases its group, so that
/// the other ranks end too. `hosts`: one number for each rank, equal for ranks of one host; empty:
/// all ranks are on one host.
inline std::vector<std::exception_ptr> run_ranks_catching(int world, const RankBody& body,
                                                          ProcessGroupOptions options = {},
                                                          const std::vector<int>& hosts = {}) {
  if (options.timeout == ProcessGroupOptions().timeout) options.timeout = std::chrono::seconds(20);
  std::vector<std::exception_ptr> errors(world);
  std::vector<std::thread> threads;
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto communicators = ThreadCommunicator::make(world);
  for (int rank = 0; rank < world; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        at::set_num_threads(1);
        if (world == 1) return body(ProcessGroup(), 0);
        auto place = comm::World::start(rank, world, options);
        place.store = store;
        place.hosts = hosts;
        place.same_host = comm::all_equal(hosts);
        if (options.backend == Backend::MPI) place.start_group.communicator = communicators[rank];
        auto transport = comm::make_transport(place);
        body(ProcessGroup(
                 std::make_shared<ProcessGroup::Impl>(std::move(place), std::move(transport))),
             rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

/// As above, and rethrows: the first exception that is not a BrokenWorldError, because that one is
/// the cause; otherwise the first BrokenWorldError.
inline void run_ranks(int world, const RankBody& body, ProcessGroupOptions options = {},
                      const std::vector<int>& hosts = {}) {
  std::exception_ptr broken;
  for (const auto& error : run_ranks_catching(world, body, options, hosts)) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const BrokenWorldError&) {
      if (!broken) broken = error;
    }
  }
  if (broken) std::rethrow_exception(broken);
}

/// As run_ranks(), with one rank for each entry of `hosts`.
inline void run_ranks_on(const std::vector<int>& hosts, const RankBody& body) {
  run_ranks(static_cast<int>(hosts.size()), body, {}, hosts);
}

/// The message of a rank's exception; empty if it did not throw.
inline std::string message_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace tessera::testing
