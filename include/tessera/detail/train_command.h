#pragma once

#include <string>
#include <vector>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The command line of a trainer: `[-n RANKS] CONFIG.yaml [key=value …] [options]`.
struct TrainCommand {
  std::string file;                    ///< the config; empty: none given
  std::vector<std::string> overrides;  ///< key=value
  std::string dump;                    ///< "full", "minimal" or ""
  bool reference = false, help = false;
  int ranks = 0;      ///< of `-n`; 0: not given
  std::string usage;  ///< the text of --help

  /// The same command without `-n`.
  std::vector<std::string> words() const;
};

/// Throws std::exception naming the option, its value and what was expected.
TrainCommand parse_train_command(int argc, char** argv);

/// Runs `program` with command.words() on command.ranks ranks of this host, and returns as
/// launch::run(). Throws UsageError when a launcher has started this process already.
int launch_ranks(const std::string& program, const TrainCommand& command);

}  // namespace tessera::detail
#pragma GCC visibility pop
