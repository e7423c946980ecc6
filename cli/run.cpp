#include <algorithm>
#include <cstdio>
#include <limits>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "commands.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/launch.h"

namespace tessera::cli {
namespace {

constexpr int kUnbounded = std::numeric_limits<int>::max();

/// The values of the flags as given, not yet parsed.
struct Flags {
  std::string nproc = "1", nnodes = "1", node_rank, master_addr, master_port, max_restarts = "0",
              rejoin_timeout, log_dir, tee, redirects;
  std::string grace = "30", restart_delay = "1", restarts_per_hour = "20", stopped_timeout = "600";
  bool standalone = false;
};

void declare(CLI::App& app, Flags& f) {
  app.footer(
      "Everything after PROGRAM is passed to it unchanged. Flags may be written with '_' instead "
      "of "
      "'-'.");
  app.add_option(
      "-n,--nproc-per-node", f.nproc,
      "Ranks to start on this host: a number, or auto or cpu for the usable processors [1]");
  app.add_option(
      "--nnodes", f.nnodes,
      "Hosts in the world, each with a launcher of its own; MIN:MAX lets the world go on "
      "with fewer [1]");
  app.add_option("--node-rank", f.node_rank,
                 "This host's number, from 0; required with several hosts");
  app.add_option("--master-addr", f.master_addr, "Address of host 0; required with several hosts");
  app.add_option("--master-port", f.master_port,
                 "Port on host 0; required with several hosts, else a free port");
  app.add_flag("--standalone", f.standalone,
               "This host alone (the default; contradicts --nnodes above 1)");
  app.add_option("--max-restarts", f.max_restarts,
                 "How many times to start all ranks again after a failure on any host [0]");
  app.add_option("--rejoin-timeout", f.rejoin_timeout,
                 "Seconds for which another host may be silent before the others go on without it; "
                 "several hosts only [60]");
  app.add_option("--restart-delay", f.restart_delay,
                 "Seconds before the first restart; the delay doubles, up to 60 [1]");
  app.add_option("--restarts-per-hour", f.restarts_per_hour,
                 "Restarts in an hour after which a failure is final [20]");
  app.add_option(
      "--stopped-timeout", f.stopped_timeout,
      "Seconds for which a rank may be stopped (SIGSTOP) while another one is not [600]");
  app.add_option("--log-dir", f.log_dir, "Write DIR/attempt_K/RANK/{stdout,stderr}.log");
  app.add_option("-t,--tee", f.tee,
                 "Streams that go to log file and console: 0 none, 1 stdout, 2 stderr, 3 both, or "
                 "by local rank 0:3,1:2"
                 " [3 with --log-dir]");
  app.add_option("-r,--redirects", f.redirects,
                 "Streams that go to the log file only, in the same form [0]");
  app.add_option("--grace", f.grace,
                 "Seconds that ranks may take to end after Ctrl-C or SIGTERM [30]");
}

std::vector<std::string> known_flags(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

/// Moves the launcher's own arguments to `own`, with '-' for '_' in names. Returns the rest: the
/// program with its arguments.
std::vector<std::string> split(const CLI::App& app, std::vector<std::string> arguments,
                               std::vector<std::string>& own) {
  size_t i = 0;
  for (; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      ++i;
      break;
    }
    if (argument.size() < 2 || argument[0] != '-') break;
    const bool is_long = argument[1] == '-';
    std::string name = is_long ? argument.substr(0, argument.find('=')) : argument.substr(0, 2);
    const std::string rest = argument.substr(name.size());
    std::replace(name.begin(), name.end(), '_', '-');
    const CLI::Option* option = app.get_option_no_throw(name);
    if (!option) throw UsageError(name + ": no such flag" + did_you_mean(name, known_flags(app)));
    const bool takes_value = option->get_items_expected_max() != 0;
    const bool last = i + 1 == arguments.size();
    if (takes_value && (rest == "=" || (rest.empty() && !last && arguments[i + 1].empty())))
      throw UsageError(name + " = '': expected a value, or no " + name);
    own.push_back(name + rest);
    if (!rest.empty() || !takes_value) continue;
    if (last) throw UsageError(name + ": expected a value");
    own.push_back(arguments[++i]);
  }
  return {arguments.begin() + static_cast<std::ptrdiff_t>(std::min(i, arguments.size())),
          arguments.end()};
}

launch::LaunchOptions interpret(const Flags& f, std::vector<std::string> program) {
  launch::LaunchOptions o;
  o.program = std::move(program);
  o.nproc_per_node = launch::parse_nproc("--nproc-per-node", f.nproc);
  launch::parse_nnodes("--nnodes", f.nnodes, o);
  if (!f.node_rank.empty())
    o.node_rank = launch::parse_integer("--node-rank", f.node_rank, 0, kUnbounded);
  o.master_addr = f.master_addr;
  if (!f.master_port.empty())
    o.master_port = launch::parse_integer("--master-port", f.master_port, 1, 65535);
  o.max_restarts = launch::parse_integer("--max-restarts", f.max_restarts, 0, kUnbounded);
  if (!f.rejoin_timeout.empty())
    o.rejoin_timeout = launch::parse_seconds("--rejoin-timeout", f.rejoin_timeout);
  o.restart_delay = launch::parse_seconds("--restart-delay", f.restart_delay);
  o.restarts_per_hour =
      launch::parse_integer("--restarts-per-hour", f.restarts_per_hour, 1, kUnbounded);
  o.stopped_timeout = launch::parse_seconds("--stopped-timeout", f.stopped_timeout);
  o.log_dir = f.log_dir;
  if (!f.tee.empty()) o.tee = launch::parse_streams("--tee", f.tee);
  if (!f.redirects.empty()) o.redirects = launch::parse_streams("--redirects", f.redirects);
  o.grace = launch::parse_seconds("--grace", f.grace);
  if (f.standalone && o.nnodes > 1)
    throw UsageError("--standalone contradicts --nnodes = " + std::to_string(o.nnodes) +
                     ": expected one of them");
  return o;
}

}  // namespace

int run_command(int argc, char** argv) {
  CLI::App app("Start PROGRAM [args…] on several ranks and supervise them.", "tessera run");
  Flags flags;
  declare(app, flags);
  try {
    std::vector<std::string> own;
    auto program = split(app, {argv + 1, argv + argc}, own);
    std::reverse(own.begin(), own.end());  // CLI11 takes arguments from the back
    app.parse(std::move(own));
    return launch::run(interpret(flags, std::move(program)));
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    std::fprintf(stderr, "tessera run: %s (tessera run --help shows the flags)\n", error.what());
  } catch (const UsageError& error) {
    std::fprintf(stderr, "tessera run: %s (tessera run --help shows the flags)\n", error.what());
  }
  return kUsageExit;
}

}  // namespace tessera::cli
