#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <string_view>

#include <sched.h>

#include "launch/restarts.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::launch {
namespace {

// Launchers write to each other several times a second. A busy machine may delay them.
constexpr std::chrono::milliseconds kLeastRejoinTimeout = std::chrono::seconds(3);

[[noreturn]] void refuse(const std::string& flag, const std::string& value,
                         const std::string& expected) {
  throw UsageError(flag + " = '" + value + "': expected " + expected);
}

/// The number that the whole `text` spells; nullopt if it spells none.
template <class Number>
std::optional<Number> number_in(std::string_view text) {
  Number value{};
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec != std::errc() || parsed.ptr != text.data() + text.size()) return std::nullopt;
  return value;
}

int usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

std::string range(int lowest, int highest) {
  if (highest == std::numeric_limits<int>::max())
    return "an integer of at least " + std::to_string(lowest);
  return "an integer from " + std::to_string(lowest) + " to " + std::to_string(highest);
}

void check_range(const std::string& flag, int value, int lowest, int highest) {
  if (value < lowest || value > highest)
    refuse(flag, std::to_string(value), range(lowest, highest));
}

void check_streams(const std::string& flag, const std::optional<StreamChoice>& choice, int nproc) {
  if (!choice) return;
  for (const auto& [local_rank, bits] : choice->ranks) {
    if (local_rank < 0 || local_rank >= nproc) {
      refuse(flag, std::to_string(local_rank) + ":" + std::to_string(bits),
             "local ranks from 0 to " + std::to_string(nproc - 1));
    }
  }
}

/// No flag sets them.
void check_ranks_of_nodes(const LaunchOptions& o) {
  if (o.ranks_of_nodes.empty()) return;
  const auto given = std::to_string(o.ranks_of_nodes.size()) + " numbers with a sum of " +
                     std::to_string(world_size(o));
  const bool positive = std::all_of(o.ranks_of_nodes.begin(), o.ranks_of_nodes.end(),
                                    [](int ranks) { return ranks > 0; });
  const auto own = static_cast<size_t>(o.node_rank.value_or(0));
  if (o.ranks_of_nodes.size() != static_cast<size_t>(o.nnodes) || !positive ||
      world_size(o) > std::numeric_limits<int>::max() || own >= o.ranks_of_nodes.size() ||
      o.ranks_of_nodes[own] != o.nproc_per_node)
    refuse("ranks_of_nodes", given,
           "a positive number for each of " + std::to_string(o.nnodes) + " hosts, " +
               std::to_string(o.nproc_per_node) + " for this one, and a sum of at most " +
               std::to_string(std::numeric_limits<int>::max()));
}

void check_rejoin(const LaunchOptions& o) {
  const std::string given = seconds_text(*o.rejoin_timeout);
  if (!hosts_meet(o))
    refuse("--rejoin-timeout", given,
           "several hosts (--nnodes) with --max-restarts above 0 or --nnodes MIN:MAX");
  if (*o.rejoin_timeout < kLeastRejoinTimeout)
    refuse("--rejoin-timeout", given, "at least " + seconds_text(kLeastRejoinTimeout) + " seconds");
}

}  // namespace

bool hosts_meet(const LaunchOptions& options) {
  return options.nnodes > 1 &&
         (options.max_restarts > 0 || options.min_nnodes.value_or(options.nnodes) < options.nnodes);
}

int64_t world_size(const LaunchOptions& options) {
  const auto& ranks = options.ranks_of_nodes;
  if (ranks.empty()) return int64_t{options.nnodes} * options.nproc_per_node;
  return std::accumulate(ranks.begin(), ranks.end(), int64_t{0});
}

int parse_integer(const std::string& flag, const std::string& text, int lowest, int highest) {
  const auto value = number_in<int>(text);
  if (!value || *value < lowest || *value > highest) refuse(flag, text, range(lowest, highest));
  return *value;
}

int parse_nproc(const std::string& flag, const std::string& text) {
  if (text == "auto" || text == "cpu") return usable_processors();
  const auto value = number_in<int>(text);
  if (!value || *value < 1) refuse(flag, text, "a number of ranks of at least 1, 'auto' or 'cpu'");
  return *value;
}

void parse_nnodes(const std::string& flag, const std::string& text, LaunchOptions& options) {
  const int unbounded = std::numeric_limits<int>::max();
  const size_t colon = text.find(':');
  if (colon == std::string::npos) {
    options.nnodes = parse_integer(flag, text, 1, unbounded);
    return;
  }
  const auto least = number_in<int>(text.substr(0, colon)),
             most = number_in<int>(text.substr(colon + 1));
  if (!least || !most || *least < 1 || *most < 1)
    refuse(flag, text, "a number of hosts of at least 1, or MIN:MAX, as 2:4");
  if (*least > *most) refuse(flag, text, "MIN:MAX with MIN of at most MAX");
  options.min_nnodes = *least;
  options.nnodes = *most;
}

StreamChoice parse_streams(const std::string& flag, const std::string& text) {
  const std::string expected =
      "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or a list such as 0:3,1:2 by local rank";
  const auto number = [&](const std::string& part, int highest) {
    const auto value = number_in<int>(part);
    if (!value || *value < 0 || *value > highest) refuse(flag, text, expected);
    return *value;
  };
  StreamChoice choice;
  if (text.find(':') == std::string::npos) {
    choice.all = number(text, kBothStreams);
    return choice;
  }
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, end - begin);
    const size_t colon = item.find(':');
    if (colon == std::string::npos) refuse(flag, text, expected);
    const int local_rank = number(item.substr(0, colon), std::numeric_limits<int>::max());
    const int bits = number(item.substr(colon + 1), kBothStreams);
    if (!choice.ranks.emplace(local_rank, bits).second)
      refuse(flag, text, "every local rank once, not " + std::to_string(local_rank) + " again");
    begin = end + 1;
  }
  return choice;
}

std::chrono::milliseconds parse_seconds(const std::string& flag, const std::string& text) {
  const auto value = number_in<double>(text);
  if (!value || !(*value >= 0) || *value > 1e6) refuse(flag, text, "seconds from 0 to 1000000");
  return std::chrono::milliseconds(std::llround(*value * 1000));
}

void validate(const LaunchOptions& o) {
  if (o.program.empty() || o.program[0].empty())
    throw UsageError("no program given: expected flags, then the program");
  const int unbounded = std::numeric_limits<int>::max();
  check_range("--nproc-per-node", o.nproc_per_node, 1, unbounded);
  check_range("--nnodes", o.nnodes, 1, unbounded / o.nproc_per_node);
  check_ranks_of_nodes(o);
  check_range("--max-restarts", o.max_restarts, 0, unbounded);
  if (o.master_port) check_range("--master-port", *o.master_port, 1, 65535);
  if (o.node_rank) check_range("--node-rank", *o.node_rank, 0, o.nnodes - 1);
  if (o.nnodes > 1) {
    const std::string several = ", because --nnodes = " + std::to_string(o.nnodes);
    if (!o.node_rank)
      throw UsageError("--node-rank is missing: expected this host's number" + several);
    if (o.master_addr.empty())
      throw UsageError("--master-addr is missing: expected the address of node 0" + several);
    if (!o.master_port)
      throw UsageError("--master-port is missing: expected a free port of node 0" + several);
  }
  if (o.min_nnodes) check_range("--nnodes MIN", *o.min_nnodes, 1, o.nnodes);
  if (o.rejoin_timeout) check_rejoin(o);
  if (hosts_meet(o) && o.master_port == 65535)
    refuse("--master-port", "65535", "a port of at most 65534: the launchers meet at the next one");
  check_streams("--tee", o.tee, o.nproc_per_node);
  check_streams("--redirects", o.redirects, o.nproc_per_node);
  if (o.redirects && o.log_dir.empty())
    throw UsageError("--redirects needs --log-dir: expected a folder for the redirected streams");
}

void check_no_launcher(int nproc) {
  if (const char* world = std::getenv("WORLD_SIZE")) {
    throw UsageError("-n = " + std::to_string(nproc) +
                     ": expected no -n under a launcher (WORLD_SIZE is set to '" + world + "')");
  }
}

}  // namespace tessera::launch
