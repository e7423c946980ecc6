#include "launch/environment.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace tessera::launch {
namespace {

std::string name_of(const std::string& entry) { return entry.substr(0, entry.find('=')); }

bool has(const std::vector<std::string>& base, const std::string& name) {
  return std::any_of(base.begin(), base.end(),
                     [&](const std::string& entry) { return name_of(entry) == name; });
}

}  // namespace

int global_rank(const LaunchOptions& options, int local_rank) {
  const int node = options.node_rank.value_or(0);
  const auto& ranks = options.ranks_of_nodes;
  if (ranks.empty()) return node * options.nproc_per_node + local_rank;
  return std::accumulate(ranks.begin(), ranks.begin() + node, local_rank);
}

bool limits_threads(const LaunchOptions& options, const std::vector<std::string>& base) {
  return options.nproc_per_node > 1 && !has(base, "OMP_NUM_THREADS");
}

std::string report_path(const Attempt& attempt, int rank) {
  return attempt.reports.empty() ? "" : attempt.reports + "/.report." + std::to_string(rank);
}

std::vector<std::string> rank_environment(const LaunchOptions& options, const Attempt& attempt,
                                          int local_rank, const std::vector<std::string>& base) {
  const std::string node_rank = std::to_string(options.node_rank.value_or(0));
  const int rank = global_rank(options, local_rank);
  std::map<std::string, std::string> set = {
      {"RANK", std::to_string(rank)},
      {"LOCAL_RANK", std::to_string(local_rank)},
      {"WORLD_SIZE", std::to_string(world_size(options))},
      {"LOCAL_WORLD_SIZE", std::to_string(options.nproc_per_node)},
      {"GROUP_RANK", node_rank},
      {"NODE_RANK", node_rank},
      {"GROUP_WORLD_SIZE", std::to_string(options.nnodes)},
      {"MASTER_ADDR", attempt.master_addr},
      {"MASTER_PORT", std::to_string(attempt.master_port)},
      {"TORCHELASTIC_RESTART_COUNT", std::to_string(attempt.number)},
      {"TORCHELASTIC_MAX_RESTARTS", std::to_string(options.max_restarts)},
      {"TORCHELASTIC_RUN_ID", attempt.run_id},
  };
  if (!attempt.rendezvous.empty()) set["TESSERA_RENDEZVOUS"] = attempt.rendezvous;
  if (!attempt.secret.empty() && !has(base, "TESSERA_SECRET") && !has(base, "TESSERA_SECRET_FILE"))
    set["TESSERA_SECRET"] = attempt.secret;
  if (!attempt.reports.empty()) set["TESSERA_REPORT"] = report_path(attempt, rank);
  if (limits_threads(options, base)) set["OMP_NUM_THREADS"] = "1";
  if (rank == 0 && attempt.terminal) {
    set["TESSERA_TTY"] = "1";
    if (attempt.columns > 0) set["COLUMNS"] = std::to_string(attempt.columns);
  }

  // A surrounding launcher's rendezvous would contradict this launcher's.
  const std::vector<std::string> dropped = {"TORCHELASTIC_USE_AGENT_STORE",
                                            "TORCHELASTIC_ERROR_FILE", "TESSERA_RENDEZVOUS",
                                            "TESSERA_REPORT", "TESSERA_TTY"};
  std::vector<std::string> result;
  for (const std::string& entry : base) {
    const std::string name = name_of(entry);
    if (set.count(name) || std::find(dropped.begin(), dropped.end(), name) != dropped.end())
      continue;
    result.push_back(entry);
  }
  for (const auto& [name, value] : set) result.push_back(name + "=" + value);
  return result;
}

}  // namespace tessera::launch
