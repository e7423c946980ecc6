#pragma once

// Everything a training program needs.

#include "tessera/checkpoint.h"
#include "tessera/comm_hook.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/distributed_optimizer.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/fused_optimizer.h"
#include "tessera/join.h"
#include "tessera/no_sync.h"
#include "tessera/optim.h"
#include "tessera/optimizer_state.h"
#include "tessera/optimizer_state_dict.h"
#include "tessera/partition.h"
#include "tessera/power_sgd.h"
#include "tessera/process_group.h"
#include "tessera/safetensors.h"
#include "tessera/sync_batch_norm.h"
#include "tessera/version.h"
#include "tessera/wrap_policy.h"
#include "tessera/zero_redundancy_optimizer.h"
