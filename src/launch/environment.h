#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/launch.h"

namespace tessera::launch {

/// Values that all ranks of one attempt have in common, in addition to the options.
struct Attempt {
  int number = 0;      ///< 0 for the first start, then the number of restarts.
  std::string run_id;  ///< The same for all attempts of a launcher.
  std::string master_addr;
  int master_port = 0;
  std::string rendezvous;  ///< The rendezvous folder; empty with several hosts.
  std::string secret;      ///< The ranks' secret if the user has set none; empty: none.
  std::string reports;     ///< The folder of the ranks' reports; empty if there is none.
  bool terminal = false;   ///< Rank 0's output is piped through the launcher to a terminal.
  int columns = 0;         ///< The width of that terminal; 0 if unknown.
};

/// The rank in the world of a local rank of this host.
int global_rank(const LaunchOptions& options, int local_rank);

/// Returns the environment of one rank as NAME=value entries: `base` plus the variables of this
/// launch, without the variables of a surrounding launcher. Pure.
std::vector<std::string> rank_environment(const LaunchOptions& options, const Attempt& attempt,
                                          int local_rank, const std::vector<std::string>& base);

/// The file for the report of a rank; empty if there is no folder for it. See RankReport.
std::string report_path(const Attempt& attempt, int rank);

/// True when OMP_NUM_THREADS=1 is added: several ranks are here and the user set nothing.
bool limits_threads(const LaunchOptions& options, const std::vector<std::string>& base);

}  // namespace tessera::launch
