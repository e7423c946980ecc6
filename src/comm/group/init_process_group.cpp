#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>

#include "comm/failures/process_failures.h"
#include "comm/group/make_transport.h"
#include "comm/group/process_group_impl.h"
#include "comm/p2p/fastest_network.h"
#include "comm/rendezvous/communicator_rendezvous.h"
#include "comm/rendezvous/launch_environment.h"
#include "comm/rendezvous/store_rendezvous.h"
#include "comm/store/addresses.h"
#include "memory/heap.h"
#include "tessera/detail/communicator.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"

namespace tessera {
namespace {

std::mutex default_mutex;

std::weak_ptr<ProcessGroup::Impl>& default_group() {
  static auto& group = *new std::weak_ptr<ProcessGroup::Impl>();  // never destroyed
  return group;
}

comm::StoreRendezvous meet(const comm::LaunchEnvironment& environment,
                           std::chrono::milliseconds timeout) {
  try {
    return comm::rendezvous_over_store(environment, timeout);
  } catch (const BrokenWorldError& error) {
    detail::report_broken(error.ranks(), error.what());
    throw;
  }
}

ProcessGroup as_default(ProcessGroup group) {
  std::lock_guard lock(default_mutex);
  default_group() = group.impl();
  return group;
}

/// If ranks of one host compute in turn on the same cores, a step takes many times longer.
void warn_of_threads(const comm::World& world) {
  const auto& hosts = world.hosts;
  const auto ranks = std::count(hosts.begin(), hosts.end(), hosts[world.rank]);
  const auto threads = at::get_num_threads();
  const auto cores = ::sysconf(_SC_NPROCESSORS_ONLN);
  if (world.rank != 0 || threads == 1 || ranks * threads <= cores) return;
  static std::once_flag warned;
  std::call_once(warned, [&] {
    spdlog::warn(
        "tessera: {} ranks on this host compute with {} threads each, and it has {} cores; "
        "expected OMP_NUM_THREADS={} on every rank",
        ranks, threads, cores, std::max<int64_t>(1, cores / ranks));
  });
}

/// The user's choice, else the fastest way that reaches all hosts.
void choose_network(comm::World& world) {
  const auto is_set = [](const char* name) {
    const char* const value = std::getenv(name);
    return value && *value;
  };
  const bool named = is_set("GLOO_SOCKET_IFNAME");
  if (named || is_set("GLOO_DEVICE_TRANSPORT")) world.start_group.communicator.reset();
  try {
    const auto route = comm::fastest_route(
        world, named ? std::vector<comm::NetworkInterface>() : comm::network_interfaces());
    world.address = route.address;
    if (!route.over_mpi) world.start_group.communicator.reset();
  } catch (const BrokenWorldError& error) {
    detail::report_broken(error.ranks(), error.what());
    throw;
  }
}

ProcessGroup connected(comm::World world, comm::StoreRendezvous rendezvous) {
  if (world.options.tune_process) memory::retain_freed_memory();
  world.hosts = std::move(rendezvous.hosts);
  world.same_host = comm::all_equal(world.hosts);
  world.address = std::move(rendezvous.address);
  if (world.options.backend != Backend::MPI) {
    if (world.same_host) world.start_group.communicator.reset();
    else choose_network(world);
  }
  warn_of_threads(world);
  world.failures = std::make_shared<comm::ProcessFailures>();
  auto transport = comm::make_transport(world);
  return as_default(ProcessGroup(ProcessGroup::Impl::make(std::move(world), std::move(transport))));
}

/// Lets the program's own library carry messages if any thread of each rank may call it, else TCP.
void with_messages(comm::World& world, std::shared_ptr<detail::Communicator> communicator,
                   const comm::StoreRendezvous& rendezvous) {
  auto& backend = world.options.backend;
  if (backend != Backend::MPI && backend != Backend::Auto) return;
  if (rendezvous.refusal.empty()) {
    world.start_group.communicator = std::move(communicator);
    return;
  }
  if (world.rank == 0 && (backend == Backend::MPI || !comm::all_equal(rendezvous.hosts)))
    spdlog::log(backend == Backend::MPI ? spdlog::level::warn : spdlog::level::info,
                "tessera: messages between hosts travel over TCP, because {}; expected "
                "MPI_THREAD_MULTIPLE for MPI to carry them",
                rendezvous.refusal);
  backend = Backend::Auto;
}

}  // namespace

std::optional<ProcessGroup> default_process_group() {
  std::lock_guard lock(default_mutex);
  auto impl = default_group().lock();
  if (!impl) return std::nullopt;
  return ProcessGroup(std::move(impl));
}

ProcessGroup init_process_group(ProcessGroupOptions options) {
  comm::check_timeout(options.timeout);
  auto environment =
      comm::read_launch_environment([](const char* name) { return std::getenv(name); });
  if (environment.size == 1) return as_default(ProcessGroup());
  // Each call makes another world with its own keys. Every rank makes the same number of calls.
  // Because of the number no rank enters the store of the world before, which rank 0 may still
  // serve.
  static int calls = 0;
  environment.world = calls;
  auto rendezvous = meet(environment, options.timeout);
  auto world = comm::World::start(environment.rank, environment.size, options);
  world.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("world{}/", calls++), rendezvous.store);
  world.start_group.rank_0_serves = !environment.agent_store;
  return connected(std::move(world), std::move(rendezvous));
}

namespace detail {

ProcessGroup init_process_group(std::shared_ptr<Communicator> communicator,
                                ProcessGroupOptions options) {
  if (communicator->size() == 1) {
    comm::check_timeout(options.timeout);
    return as_default(ProcessGroup());
  }
  auto rendezvous = comm::rendezvous_over_communicator(*communicator, options);
  auto world = comm::World::start(communicator->rank(), communicator->size(), options);
  world.store = rendezvous.store;
  world.start_group.rank_0_serves = true;
  with_messages(world, std::move(communicator), rendezvous);
  return connected(std::move(world), std::move(rendezvous));
}

}  // namespace detail
}  // namespace tessera
