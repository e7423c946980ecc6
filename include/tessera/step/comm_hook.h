#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/process_group.h"

namespace tessera {

/// Gradients that are sent together, of one dtype and device.
struct GradientBucket {
  size_t index = 0;                   ///< Buckets are sent from 0 on, in this order on all ranks.
  at::Tensor flat;                    ///< 1-D: all of them.
  std::vector<std::string> names;     ///< Of the parameters.
  std::vector<at::Tensor> gradients;  ///< Windows of `flat` in the parameters' shapes.
};

/// Replaces the averaging of one bucket of gradients. Called on every rank, in the same order,
/// within backward, with this rank's gradients; starts what it needs on `group` and returns a
/// function that waits and leaves in the same memory what the parameters shall get (for an average:
/// the mean over all ranks). These functions are called after the last bucket was started, in the
/// order of the buckets; they may make collectives of their own.
using CommHook =
    std::function<std::function<void()>(ProcessGroup& group, const GradientBucket& bucket)>;

/// The mean, sent as float16 or bfloat16: half the bytes; each gradient is rounded before the sum,
/// which is taken in float.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

}  // namespace tessera
