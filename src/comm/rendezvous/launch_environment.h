#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tessera/detail/launch_environment.h"

namespace tessera::comm {

/// The launcher's values in the environment of this process.
struct LaunchEnvironment {
  /// "torchrun" (also `tessera run`), "Open MPI", "PMI", "Slurm" or "none".
  std::string launcher = "none";
  int rank = 0;
  int size = 1;
  std::string size_variable = "WORLD_SIZE";  ///< The variable that `size` was read from.
  std::optional<int> local_rank;  ///< Number among the ranks on this host, if the launcher sets it.
  std::optional<int> local_size;  ///< Ranks on this host, if the launcher sets it.
  std::string master_address;     ///< MASTER_ADDR; empty when unset.
  int master_port = 0;            ///< MASTER_PORT; 0 when unset.
  std::string rendezvous;         ///< TESSERA_RENDEZVOUS: a private folder that all ranks see.
  bool agent_store = false;       ///< TORCHELASTIC_USE_AGENT_STORE: the launcher serves the store.
  int attempt = 0;                ///< TORCHELASTIC_RESTART_COUNT.
  std::string run;                ///< TORCHELASTIC_RUN_ID; not unique: other runs may have it too.
  /// An identifier that all ranks of this job share and no other job of this user has; may be
  /// empty.
  std::string job;
  int world = 0;  ///< Number of the worlds that this process has made before.
};

/// Returns the value of an environment variable, or null when it is unset; as std::getenv.
using GetVariable = std::function<const char*(const char* name)>;

/// The launchers are tried in the order torchrun, Open MPI, PMI, Slurm; the first one with all of
/// its variables set is used. Pure: reads nothing but `get`. Throws UsageError naming the variable
/// when a value is not a number, is out of range, or contradicts another variable.
LaunchEnvironment read_launch_environment(const GetVariable& get);

/// As tessera::detail::launcher_rank() with the variables that `get` returns. Pure.
detail::LauncherRank read_launcher_rank(const GetVariable& get) noexcept;

}  // namespace tessera::comm
