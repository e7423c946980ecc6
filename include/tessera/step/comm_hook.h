#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Gradients that are reduced together. They have one dtype and one device.
struct GradientBucket {
  size_t index = 0;                   ///< All ranks start their buckets in this order, from 0.
  at::Tensor flat;                    ///< 1-D: all gradients of the bucket.
  std::vector<std::string> names;     ///< Names of the parameters.
  std::vector<at::Tensor> gradients;  ///< Views of `flat` in the shapes of the parameters.
};

/// Replaces the averaging of one bucket of gradients. The hook is called during backward, on every
/// rank, in the same order, with this rank's gradients. It starts its collectives on `group` and
/// returns a function. That function waits for them and writes the gradients that the parameters
/// get into the bucket's memory (for an average: the mean over all ranks). The returned functions
/// are called after the last bucket was started, in the order of the buckets. They may start
/// collectives themselves.
using CommHook =
    std::function<std::function<void()>(ProcessGroup& group, const GradientBucket& bucket)>;

/// The mean, sent as float16 or bfloat16, which halves the bytes. Each gradient is divided by the
/// world size and then rounded; the sum is computed in float32 and rounded once.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

}  // namespace tessera
#pragma GCC visibility pop
