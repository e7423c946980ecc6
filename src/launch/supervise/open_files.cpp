#include "launch/supervise/open_files.h"

#include <algorithm>
#include <bit>
#include <set>

#include <fcntl.h>
#include <sys/resource.h>

#include "launch/environment.h"
#include "launch/output/mux.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

int pipes_of(const LaunchOptions& options, int local_rank, bool merged) {
  if (inherits_streams(options)) return 0;
  return shares_a_pipe(plan_streams(options, local_rank), merged) ? 1 : 2;
}

/// Files of one rank: its pidfd, the pipe that reports its execve, its output pipes and log files.
int kept_for(const LaunchOptions& options, int local_rank, bool merged) {
  const auto files = static_cast<unsigned>(plan_streams(options, local_rank).files);
  return 2 + pipes_of(options, local_rank, merged) + std::popcount(files);
}

/// The local ranks that --tee or --redirects name. All others have equal needs.
std::set<int> named_ranks(const LaunchOptions& options) {
  std::set<int> result;
  for (const auto* choice : {&options.tee, &options.redirects}) {
    if (!*choice) continue;
    for (const auto& [local_rank, bits] : (*choice)->ranks) result.insert(local_rank);
  }
  return result;
}

/// The number of open descriptors below `end`. Only the first 1024 are checked: a launcher with
/// descriptors above these has no small limit.
int64_t open_below(rlim_t end) {
  int64_t count = 0;
  for (int fd = 0; fd < static_cast<int>(std::min<rlim_t>(end, 1024)); ++fd)
    count += fcntl(fd, F_GETFD) >= 0;
  return count;
}

}  // namespace

int64_t needed_open_files(const LaunchOptions& options, bool merged) {
  const int nproc = options.nproc_per_node;
  const auto named = named_ranks(options);
  int64_t needed = 2;  // the guard and the lock of the rendezvous folder
  for (int local_rank : named) needed += kept_for(options, local_rank, merged);
  int other = 0;
  while (named.count(other)) ++other;
  needed += (nproc - static_cast<int64_t>(named.size())) * kept_for(options, other, merged);
  // While the last rank starts, its ends of the pipes and /dev/null as its input are open too.
  const bool null_input = global_rank(options, nproc - 1) != 0;
  return needed + 1 + pipes_of(options, nproc - 1, merged) + null_input;
}

void check_open_files(const LaunchOptions& options, bool merged) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const int64_t more = needed_open_files(options, merged);
  if (static_cast<rlim_t>(open_below(limit.rlim_cur) + more) <= limit.rlim_cur) return;
  const int64_t needed = open_below(RLIM_INFINITY) + more;
  throw UsageError("--nproc-per-node = '" + std::to_string(options.nproc_per_node) + "': needs " +
                   std::to_string(needed) + " open files in the launcher, 'ulimit -n' allows " +
                   std::to_string(limit.rlim_cur) + ": expected fewer ranks or 'ulimit -n " +
                   std::to_string(needed) + "'");
}

}  // namespace tessera::launch
