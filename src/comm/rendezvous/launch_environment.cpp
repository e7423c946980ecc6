#include "comm/rendezvous/launch_environment.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include <fmt/format.h>

#include "comm/rendezvous/slurm_master.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

struct Names {
  const char* launcher;
  const char *rank, *size, *local_rank, *local_size;
  const char *job, *job_step;
};

// In the order in which they are tried. A launcher counts as present when its rank is set;
// torchrun also when its size is set.
constexpr Names kLaunchers[] = {
    {"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", nullptr, nullptr},
    {"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "PMIX_NAMESPACE", "OMPI_MCA_orte_ess_jobid"},
    {"PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_JOBID",
     "HYDRA_JOBID"},
    {"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", nullptr, "SLURM_JOB_ID",
     "SLURM_STEP_ID"},
};

std::optional<int> number(const GetVariable& get, const char* name, int least, int most) {
  const char* text = name ? get(name) : nullptr;
  if (!text || !*text) return std::nullopt;
  int value = 0;
  const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
  if (error != std::errc() || *end || value < least || value > most) {
    throw UsageError(
        fmt::format("init_process_group: environment variable {} is '{}'; expected a whole number "
                    "from {} to {}",
                    name, text, least, most));
  }
  return value;
}

std::string text(const GetVariable& get, const char* name) {
  const char* value = name ? get(name) : nullptr;
  return value ? value : "";
}

constexpr int kMaxCount = 1 << 20;

/// SLURM_NTASKS and SLURM_NNODES may describe the whole job although this process belongs to a
/// smaller step (srun -E), so the step's variables take precedence.
std::optional<int> step_number(const GetVariable& get, const char* step, const char* job) {
  const auto value = number(get, step, 1, kMaxCount);
  return value ? value : number(get, job, 1, kMaxCount);
}

/// True in a batch script of sbatch: it has SLURM_PROCID = 0 but is not a rank of a step.
bool is_batch_script(const GetVariable& get) {
  return text(get, "ENVIRONMENT") == "BATCH" && text(get, "SLURM_STEP_NUM_TASKS").empty();
}

/// True when the PMI variables come from srun --mpi=pmi2: they then equal Slurm's own variables,
/// which are preferred because they also describe the hosts. The ranks of an mpiexec inside a step
/// are numbered differently.
bool equals_slurm(const GetVariable& get, int rank, int size) {
  return number(get, "SLURM_PROCID", 0, kMaxCount) == rank &&
         step_number(get, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") == size;
}

/// The first of the launchers' variables that holds a number of at least 0; never throws.
std::optional<int> first_number(const GetVariable& get, const char* Names::*variable) noexcept {
  for (const auto& names : kLaunchers) {
    const char* text = get(names.*variable);
    if (!text) continue;
    int value = 0;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
    if (error == std::errc() && !*end && value >= 0) return value;
  }
  return std::nullopt;
}

/// Each number of a rank is below its count.
void check_numbers(const Names& names, const LaunchEnvironment& found) {
  const auto refuse = [](const char* variable, int value, const char* limit, const char* other,
                         int count) {
    throw UsageError(fmt::format(
        "init_process_group: environment variable {} is {}; expected {} {}, which is {}", variable,
        value, limit, other, count));
  };
  const char* const size = found.size_variable.c_str();
  if (found.rank >= found.size) refuse(names.rank, found.rank, "less than", size, found.size);
  if (found.local_size && *found.local_size > found.size)
    refuse(names.local_size, *found.local_size, "at most", size, found.size);
  if (found.local_rank && found.local_size && *found.local_rank >= *found.local_size)
    refuse(names.local_rank, *found.local_rank, "less than", names.local_size, *found.local_size);
}

}  // namespace

detail::LauncherRank read_launcher_rank(const GetVariable& get) noexcept {
  return {first_number(get, &Names::rank).value_or(0), first_number(get, &Names::local_rank)};
}

LaunchEnvironment read_launch_environment(const GetVariable& get) {
  LaunchEnvironment result;
  for (const auto& names : kLaunchers) {
    const bool slurm = std::strcmp(names.launcher, "Slurm") == 0;
    const auto rank = number(get, names.rank, 0, kMaxCount);
    const auto size = slurm ? step_number(get, "SLURM_STEP_NUM_TASKS", names.size)
                            : number(get, names.size, 1, kMaxCount);
    if (!rank && !(size && std::strcmp(names.launcher, "torchrun") == 0)) continue;
    if (slurm && is_batch_script(get)) continue;
    if (rank && size && std::strcmp(names.launcher, "PMI") == 0 && equals_slurm(get, *rank, *size))
      continue;
    const char* const size_name =
        slurm && !text(get, "SLURM_STEP_NUM_TASKS").empty() ? "SLURM_STEP_NUM_TASKS" : names.size;
    if (!rank || !size) {
      throw UsageError(fmt::format(
          "init_process_group: environment variable {} is set but {} is not; a launcher sets both",
          rank ? names.rank : size_name, rank ? size_name : names.rank));
    }
    result.launcher = names.launcher;
    result.rank = *rank;
    result.size = *size;
    result.size_variable = size_name;
    result.local_rank = number(get, names.local_rank, 0, kMaxCount);
    result.local_size = number(get, names.local_size, 1, kMaxCount);
    check_numbers(names, result);
    result.job = text(get, names.job);
    if (const auto step = text(get, names.job_step); !step.empty()) result.job += "." + step;
    if (slurm && step_number(get, "SLURM_STEP_NUM_NODES", "SLURM_NNODES") == 1)
      result.local_size = result.size;
    break;
  }
  result.master_address = text(get, "MASTER_ADDR");
  result.master_port = number(get, "MASTER_PORT", 1, 65535).value_or(0);
  // The ranks of one host find each other in a folder.
  if (result.launcher == "Slurm" && result.size > 1 && result.local_size != result.size)
    add_slurm_master(get, result);
  if (result.size > 1) result.rendezvous = text(get, "TESSERA_RENDEZVOUS");
  const auto agent = text(get, "TORCHELASTIC_USE_AGENT_STORE");
  result.agent_store = agent == "True" || agent == "true" || agent == "1";
  result.attempt = number(get, "TORCHELASTIC_RESTART_COUNT", 0, kMaxCount).value_or(0);
  result.run = text(get, "TORCHELASTIC_RUN_ID");
  if (result.master_address.empty() != (result.master_port == 0) && result.size > 1 &&
      result.rendezvous.empty()) {
    throw UsageError(fmt::format(
        "init_process_group: environment variable {} is set but {} is not; set both or neither",
        result.master_port ? "MASTER_PORT" : "MASTER_ADDR",
        result.master_port ? "MASTER_ADDR" : "MASTER_PORT"));
  }
  return result;
}

}  // namespace tessera::comm

namespace tessera::detail {

LauncherRank launcher_rank() noexcept {
  return comm::read_launcher_rank([](const char* name) { return std::getenv(name); });
}

}  // namespace tessera::detail
