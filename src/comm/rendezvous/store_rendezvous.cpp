#include "comm/rendezvous/store_rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unistd.h>

#include "comm/base/call_with_timeout.h"
#include "comm/base/roll_call.h"
#include "comm/base/world.h"
#include "comm/rendezvous/agent_store.h"
#include "comm/rendezvous/announced_folder.h"
#include "comm/rendezvous/own_store.h"
#include "comm/store/addresses.h"
#include "tessera/detail/proc.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;

/// Every rank writes `value`. Returns all values in rank order. Throws UsageError if another rank
/// was told another world size, and BrokenWorldError naming the ranks that did not arrive in time.
std::vector<std::string> values_of_all(const Store& store, const LaunchEnvironment& environment,
                                       const std::string& value, std::chrono::milliseconds timeout,
                                       Clock::time_point deadline) {
  try {
    std::vector<std::string> values(environment.size);
    for (auto& [rank, written] :
         roll_call(store, "here", environment.rank, environment.size, value, deadline)) {
      if (written.size != environment.size) {
        throw UsageError(fmt::format(
            "init_process_group: rank {}: {} is {} here and {} on rank {}; expected the same on "
            "every rank",
            environment.rank, environment.size_variable, environment.size, written.size, rank));
      }
      values[rank] = std::move(written.value);
    }
    return values;
  } catch (const RanksMissing& missing) {
    throw BrokenWorldError(
        fmt::format("init_process_group: rank {} of {}: {} did not arrive within {} ms",
                    environment.rank, environment.size, rank_list(missing.ranks), timeout.count()),
        missing.ranks);
  }
}

/// A name of the file at `path` that stays valid when its folder is removed, as the system removes
/// XDG_RUNTIME_DIR when the user logs out. The file stays open until the process ends.
std::string lasting_name(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  const auto name = fmt::format("/proc/self/fd/{}", fd);
  if (fd < 0 || ::access(name.c_str(), R_OK | W_OK) == 0) return fd < 0 ? path : name;
  ::close(fd);
  return path;
}

Store file_store(const std::string& folder, const LaunchEnvironment& environment) {
  struct stat info {};
  const int error = ::stat(folder.c_str(), &info) != 0 ? errno
                    : S_ISDIR(info.st_mode)            ? 0
                                                       : ENOTDIR;
  if (error)
    throw UsageError(
        fmt::format("init_process_group: rank {}: the rendezvous folder {} cannot be used: {}",
                    environment.rank, folder, std::strerror(error)));
  return c10::make_intrusive<c10d::FileStore>(lasting_name(folder + "/store"), environment.size);
}

std::string file_name(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](unsigned char c) { return !std::isalnum(c) && c != '.' && c != '-'; }, '_');
  return text;
}

std::string folder_key(const LaunchEnvironment& environment) {
  if (environment.master_port == 0)
    return file_name("job-" + (environment.job.empty() ? "parent-" + std::to_string(::getppid())
                                                       : environment.job));
  const auto port = fmt::format("port-{}", environment.master_port);
  if (!environment.agent_store) return port;
  // An agent's port is unique only in its network, and stays the same when the ranks are restarted.
  constexpr size_t kMaxRunLength = 100;
  return file_name(fmt::format("{}-attempt-{}-{}", port, environment.attempt,
                               environment.run.substr(0, kMaxRunLength)));
}

/// The store in the folder that the launcher gave, else in the one that rank 0 announces under the
/// name `place`. If a process meets the same ranks again, it uses the same store: a store keeps all
/// keys in memory, and its destructor would end the process if the folder had been removed before.
Store store_on_host(const LaunchEnvironment& environment, const std::string& place,
                    std::chrono::milliseconds timeout) {
  static auto& known = *new std::map<std::string, Store>();  // never destroyed
  static std::mutex mutex;
  // Ranks may be threads of one process, and children of a process that has met other ranks.
  const auto key = fmt::format("{} {} {}", ::getpid(), environment.rank, place);
  std::unique_lock lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  lock.unlock();
  const bool given = !environment.rendezvous.empty();
  auto store = file_store(
      given ? place : announced_folder(place, environment.rank, environment.size, timeout),
      environment);
  lock.lock();
  return known[key] = std::move(store);
}

StoreRendezvous on_host(const LaunchEnvironment& environment, std::chrono::milliseconds timeout) {
  const auto place =
      environment.rendezvous.empty() ? folder_key(environment) : environment.rendezvous;
  try {
    StoreRendezvous rendezvous{store_on_host(environment, place, timeout),
                               std::vector<int>(environment.size, 0), ""};
    rendezvous.store->setTimeout(timeout);
    values_of_all(rendezvous.store, environment, "", timeout, Clock::now() + timeout);
    return rendezvous;
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw UsageError(fmt::format(
        "init_process_group: rank {} of {} cannot use the rendezvous file {}/store: {}; "
        "expected a file system with flock(): set TMPDIR to a local folder",
        environment.rank, environment.size, place, compat::first_line(error.what())));
  }
}

/// The store at MASTER_ADDR:MASTER_PORT and the values that all ranks wrote there.
struct Meeting {
  Store store;
  std::vector<std::string> values;
};

Meeting meet(const LaunchEnvironment& environment, const std::string& value,
             std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  OwnStore own;
  try {
    if (environment.agent_store) own.store = agent_store(environment, timeout);
    else own = own_store(environment, timeout);
    Meeting done;
    done.store = c10::make_intrusive<c10d::PrefixStore>(
        fmt::format("tessera/{}", environment.attempt), own.store);
    done.store->setTimeout(timeout);
    done.values = values_of_all(done.store, environment, value, timeout, deadline);
    return done;
  } catch (const BrokenWorldError& error) {
    throw BrokenWorldError(error.what() + own.remark(), error.ranks());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw_useless_store(environment, timeout, compat::first_line(error.what()));
  }
}

StoreRendezvous between_hosts(const LaunchEnvironment& environment,
                              std::chrono::milliseconds timeout) {
  // Within this extra time the inner call reports its own, more precise error.
  constexpr std::chrono::milliseconds kLonger{1500};
  const auto own = network_identity();
  const auto address = address_towards(environment.master_address);
  const auto value = own + " " + address;
  const auto done =
      call_with_timeout(timeout + kLonger, [=] { return meet(environment, value, timeout); });
  if (!done) throw_useless_store(environment, timeout, "it does not answer");
  StoreRendezvous rendezvous{done->store, {}, address};
  std::vector<std::string> addresses, identities;
  for (const auto& theirs : done->values) {
    const auto blank = theirs.rfind(' ');
    identities.push_back(theirs.substr(0, blank));
    addresses.push_back(theirs.substr(blank + 1));
    rendezvous.hosts.push_back(static_cast<int>(
        std::find(identities.begin(), identities.end(), identities.back()) - identities.begin()));
  }
  // On the master's host the route to MASTER_ADDR may give only a loopback address (Debian's
  // 127.0.1.1). The route to another host then gives the address.
  for (int r = 0;
       r < environment.size && (rendezvous.address.empty() || is_loopback(rendezvous.address)); ++r)
    if (identities[r] != own && !is_loopback(addresses[r]))
      rendezvous.address = address_towards(addresses[r]);
  return rendezvous;
}

/// Agents of torchrun may use a loopback address and still run in different containers, so with
/// these agents only the numbers of ranks show that there is one host.
bool on_one_host(const LaunchEnvironment& environment) {
  return environment.local_size == environment.size ||
         (!environment.agent_store && is_loopback(environment.master_address));
}

}  // namespace

void check_timeout(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0)
    throw UsageError(fmt::format("init_process_group: timeout is {} ms; expected a positive one",
                                 timeout.count()));
}

std::string network_identity() {
  char host[256] = {};
  ::gethostname(host, sizeof(host) - 1);
  struct stat info {};
  ::stat("/proc/self/ns/net", &info);
  return fmt::format("{}/{}/{}", detail::boot_id(), host, info.st_ino);
}

StoreRendezvous rendezvous_over_store(const LaunchEnvironment& environment,
                                      std::chrono::milliseconds timeout) {
  if (!environment.rendezvous.empty() || on_one_host(environment))
    return on_host(environment, timeout);
  if (environment.master_port == 0) {
    throw UsageError(fmt::format(
        "init_process_group: rank {}: {} started {} ranks on several hosts, but MASTER_ADDR and "
        "MASTER_PORT are not set; "
        "pass them to every rank ({})",
        environment.rank, environment.launcher, environment.size,
        environment.launcher == "Slurm" ? "export MASTER_ADDR=host MASTER_PORT=29500 before srun; "
                                          "the host is the first of SLURM_STEP_NODELIST"
                                        : "mpirun -x MASTER_ADDR=host -x MASTER_PORT=29500 …"));
  }
  return between_hosts(environment, timeout);
}

}  // namespace tessera::comm
