#include "tessera/step/comm_hook.h"

namespace tessera {
namespace {

CommHook compress_to(at::ScalarType dtype) {
  return [dtype](ProcessGroup& group, const GradientBucket& bucket) -> std::function<void()> {
    auto gradients = bucket.flat;
    // Divided before it is rounded: the sum of two values in the upper half of the range would
    // overflow.
    auto small = gradients.mul(1.0 / group.size()).to(dtype);
    auto work = group.all_reduce_async(small);
    return [work, small, gradients]() mutable {
      work.wait();
      gradients.copy_(small);
    };
  };
}

}  // namespace

CommHook fp16_compress_hook() { return compress_to(at::kHalf); }
CommHook bf16_compress_hook() { return compress_to(at::kBFloat16); }

}  // namespace tessera
