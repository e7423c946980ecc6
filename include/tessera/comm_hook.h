#pragma once

#include "tessera/process_group.h"

#include <functional>

namespace tessera {

/// Replaces the averaging of one bucket of gradients. Called on every rank, in the same order, within backward, with this
/// rank's gradients (1-D); starts what it needs on `group` and returns a function that waits and leaves in the same
/// tensor what the parameters shall get (for an average: the mean over ranks).
using CommHook = std::function<std::function<void()>(ProcessGroup& group, at::Tensor gradients)>;

/// The mean, sent as float16 or bfloat16: half the bytes; each gradient is rounded before the sum, which is taken in float.
CommHook fp16_compress_hook();
CommHook bf16_compress_hook();

}  // namespace tessera
