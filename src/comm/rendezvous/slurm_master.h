#pragma once

#include <string>

#include "comm/rendezvous/launch_environment.h"

namespace tessera::comm {

/// The first host of a list as Slurm writes it: `node03` of "node[03-05,9],gpu1". Pure. Throws
/// UsageError, naming `variable`, for any other text.
std::string first_slurm_host(const std::string& variable, const std::string& list);

/// Sets MASTER_ADDR and MASTER_PORT of a step over several hosts, if `result` has neither. The
/// address is the first host of SLURM_STEP_NODELIST, else SLURM_NODELIST, else
/// SLURM_JOB_NODELIST. The port is the first one of SLURM_STEP_RESV_PORTS, else one from 20000 to
/// 29999 that follows from SLURM_JOB_ID and SLURM_STEP_ID. Changes nothing where the variables are
/// not set. Pure. Throws UsageError naming the variable.
void add_slurm_master(const GetVariable& get, LaunchEnvironment& result);

}  // namespace tessera::comm
