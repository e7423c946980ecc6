#include "comm/shm/shm_kernels.h"

#include <algorithm>
#include <cstring>

#include "comm/base/tree_sum.h"
#include "comm/shm/shm_sum.h"

namespace tessera::comm {
namespace {

SumKernel kernel_for(c10::ScalarType dtype) {
  const SumKernel kernel = avx2_sum_kernel(dtype);
  return kernel != nullptr ? kernel : generic_sum_kernel(dtype);
}

// For dtypes without a kernel, by libtorch. Works block by block, so that the sum stays in cache.
void sum_in_blocks(c10::ScalarType dtype, const SumRun& run) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t block = 64 * 1024 / width;
  for (int64_t i = 0; i < run.count; i += block) {
    const int64_t length = std::min(block, run.count - i);
    const auto view = [&](size_t s) {
      return at::from_blob(const_cast<std::byte*>(run.inputs[s] + i * width), {length},
                           at::TensorOptions().dtype(dtype));
    };
    const auto sum =
        add_in_tree(run.input_count, view, [](const at::Tensor& a, const at::Tensor& b) {
          return a.add(b);
        }).clone();
    if (run.scale != 1) sum.mul_(run.scale);
    const auto* data = static_cast<const std::byte*>(sum.data_ptr());
    for (size_t o = 0; o < run.output_count; ++o)
      std::memcpy(run.outputs[o] + i * width, data, length * width);
  }
}

}  // namespace

void sum_ranks(c10::ScalarType dtype, const std::vector<std::byte*>& outputs,
               const std::vector<const std::byte*>& inputs, int64_t count, double scale) {
  const SumRun run{outputs.data(), outputs.size(), inputs.data(), inputs.size(), count, scale};
  const SumKernel kernel = scale == 1 || c10::isFloatingType(dtype) ? kernel_for(dtype) : nullptr;
  return kernel != nullptr ? kernel(run) : sum_in_blocks(dtype, run);
}

}  // namespace tessera::comm
