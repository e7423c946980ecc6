#include <algorithm>
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

/// Declares the flags, which set `o`.
void declare(CLI::App& app, launch::LaunchOptions& o) {
  app.footer(
      "Everything after PROGRAM is passed to it unchanged. Flags may be written with '_' instead "
      "of '-'.");
  // `set` gets the flag's name and its text.
  const auto flag = [&app](const std::string& name, const char* help, const auto& set,
                           const char* letter = "") {
    app.add_option_function<std::string>(
        letter + name, [name, set](const std::string& text) { set(name, text); }, help);
  };
  flag(
      "--nproc-per-node",
      "Ranks to start on this host: a number, or auto or cpu for the usable processors [1]",
      [&](auto&... given) { o.nproc_per_node = launch::parse_nproc(given...); }, "-n,");
  flag("--nnodes",
       "Hosts in the world, each with a launcher of its own; MIN:MAX lets the world go on "
       "with fewer [1]",
       [&](auto&... given) { launch::parse_nnodes(given..., o); });
  flag("--node-rank", "This host's number, from 0; required with several hosts",
       [&](auto&... given) { o.node_rank = launch::parse_integer(given..., 0, kUnbounded); });
  app.add_option("--master-addr", o.master_addr, "Address of host 0; required with several hosts");
  flag("--master-port", "Port on host 0; required with several hosts, else a free port",
       [&](auto&... given) { o.master_port = launch::parse_integer(given..., 1, 65535); });
  app.add_flag("--standalone")
      ->description("This host alone (the default; contradicts --nnodes above 1)");
  flag("--max-restarts", "How many times to start all ranks again after a failure on any host [0]",
       [&](auto&... given) { o.max_restarts = launch::parse_integer(given..., 0, kUnbounded); });
  flag("--rejoin-timeout",
       "Seconds for which another host may be silent before the others go on without it; "
       "several hosts only [60]",
       [&](auto&... given) { o.rejoin_timeout = launch::parse_seconds(given...); });
  flag("--restart-delay", "Seconds before the first restart; the delay doubles, up to 60 [1]",
       [&](auto&... given) { o.restart_delay = launch::parse_seconds(given...); });
  flag("--restarts-per-hour", "Restarts in an hour after which a failure is final [20]",
       [&](auto&... given) {
         o.restarts_per_hour = launch::parse_integer(given..., 1, kUnbounded);
       });
  flag("--stopped-timeout",
       "Seconds for which a rank may be stopped (SIGSTOP) while another one is not [600]",
       [&](auto&... given) { o.stopped_timeout = launch::parse_seconds(given...); });
  app.add_option("--log-dir", o.log_dir, "Write DIR/attempt_K/RANK/{stdout,stderr}.log");
  flag(
      "--tee",
      "Streams that go to log file and console: 0 none, 1 stdout, 2 stderr, 3 both, or "
      "by local rank 0:3,1:2 [3 with --log-dir]",
      [&](auto&... given) { o.tee = launch::parse_streams(given...); }, "-t,");
  flag(
      "--redirects", "Streams that go to the log file only, in the same form [0]",
      [&](auto&... given) { o.redirects = launch::parse_streams(given...); }, "-r,");
  flag("--grace", "Seconds that ranks may take to end after Ctrl-C or SIGTERM [30]",
       [&](auto&... given) { o.grace = launch::parse_seconds(given...); });
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

}  // namespace

int run_command(int argc, char** argv) {
  CLI::App app("Start PROGRAM [args…] on several ranks and supervise them.", "tessera run");
  launch::LaunchOptions options;
  declare(app, options);
  return run_app(app, [&] {
    std::vector<std::string> own;
    options.program = split(app, {argv + 1, argv + argc}, own);
    std::reverse(own.begin(), own.end());  // CLI11 takes arguments from the back
    app.parse(std::move(own));
    if (app.count("--standalone") > 0 && options.nnodes > 1)
      throw UsageError("--standalone contradicts --nnodes = " + std::to_string(options.nnodes) +
                       ": expected one of them");
    return launch::run(options);
  });
}

}  // namespace tessera::cli
