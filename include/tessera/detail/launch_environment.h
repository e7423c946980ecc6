#pragma once

#include <optional>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The numbers that a launcher gave this process through its environment.
struct LauncherRank {
  int rank = 0;                   ///< Rank in the world; 0 without a launcher.
  std::optional<int> local_rank;  ///< Number among the ranks on this host, if the launcher sets it.
};

/// For messages before a process group exists. Reads the variables of torchrun and `tessera run`
/// (RANK, LOCAL_RANK), Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_LOCAL_RANK), PMI (PMI_RANK,
/// MPI_LOCALRANKID) and Slurm (SLURM_PROCID, SLURM_LOCALID), in this order. A value that is not a
/// number counts as unset: init_process_group() reports it. Once there is a group, use its rank()
/// and local_rank(). Local.
LauncherRank launcher_rank() noexcept;

}  // namespace tessera::detail
#pragma GCC visibility pop
