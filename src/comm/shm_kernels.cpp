#include "comm/shm_kernels.h"

#include "comm/shm_sum.h"
#include "comm/transport.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm {
namespace {

// Any other dtype, piece by piece so that the sum stays in cache.
void sum_tensors(c10::ScalarType dtype, const SumRun& run) {
  const int64_t width = static_cast<int64_t>(c10::elementSize(dtype));
  const int64_t piece = 64 * 1024 / width;
  for (int64_t i = 0; i < run.count; i += piece) {
    const int64_t length = std::min(piece, run.count - i);
    const auto view = [&](const std::byte* data) {
      return at::from_blob(const_cast<std::byte*>(data) + i * width, {length}, at::TensorOptions().dtype(dtype));
    };
    at::Tensor sum = view(run.inputs[0]).clone();
    for (size_t s = 1; s < run.input_count; ++s) add_in_place(sum, view(run.inputs[s]));
    if (run.scale != 1) sum.mul_(run.scale);
    for (size_t o = 0; o < run.output_count; ++o) std::memcpy(run.outputs[o] + i * width, sum.data_ptr(), length * width);
  }
}

}  // namespace

void sum_ranks(c10::ScalarType dtype, const std::vector<std::byte*>& outputs, const std::vector<const std::byte*>& inputs,
               int64_t count, double scale) {
  const SumRun run{outputs.data(), outputs.size(), inputs.data(), inputs.size(), count, scale};
  if (scale != 1 && !c10::isFloatingType(dtype)) return sum_tensors(dtype, run);
  if (const SumKernel kernel = avx2_sum_kernel(dtype)) return kernel(run);
  if (const SumKernel kernel = generic_sum_kernel(dtype)) return kernel(run);
  sum_tensors(dtype, run);
}

}  // namespace tessera::comm
