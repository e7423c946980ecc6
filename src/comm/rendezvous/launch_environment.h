#pragma once

#include <functional>
#include <optional>
#include <string>

namespace tessera::comm {

/// What a launcher told this process through its environment. Pure: reads nothing but `get`.
struct LaunchEnvironment {
  std::string launcher =
      "none";  ///< "torchrun" (also `tessera run`), "Open MPI", "PMI", "Slurm", "none"
  int rank = 0;
  int size = 1;
  std::string size_variable = "WORLD_SIZE";  ///< Where it stood.
  int local_rank = 0;
  std::optional<int> local_size;  ///< Ranks on this host, where the launcher tells.
  std::string master_address;     ///< MASTER_ADDR; empty when unset
  int master_port = 0;            ///< MASTER_PORT; 0 when unset
  std::string rendezvous;         ///< TESSERA_RENDEZVOUS: a private folder that all ranks see
  bool agent_store = false;       ///< TORCHELASTIC_USE_AGENT_STORE: the launcher serves the store
  int attempt = 0;                ///< TORCHELASTIC_RESTART_COUNT
  std::string run;                ///< TORCHELASTIC_RUN_ID; other runs may have the same
  std::string job;  ///< Something all ranks of this job share and no other job of this user has;
                    ///< may be empty
};

using GetVariable = std::function<const char*(const char* name)>;

/// Throws UsageError naming the variable for values that are not numbers, out of range, or
/// contradict each other.
LaunchEnvironment read_launch_environment(const GetVariable& get);

}  // namespace tessera::comm
