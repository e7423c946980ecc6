#include "tessera/weights/tensor_source.h"

#include <fmt/format.h>

#include "tessera/detail/resolved.h"
#include "tessera/error.h"

namespace tessera {

at::Tensor TensorSource::load_bytes(const std::string& name) const {
  const at::Tensor tensor = detail::resolved(load(name)).contiguous();
  const auto size = static_cast<int64_t>(tensor.nbytes());
  if (size == 0) return at::empty({0}, at::kByte);
  return at::from_blob(
      tensor.data_ptr(), {size}, [tensor](void*) {}, at::kByte);
}

void TensorSource::check_slice(const std::string& where, int64_t numel, at::ScalarType type,
                               int64_t elem_begin, int64_t elem_count, const at::Tensor& out) {
  if (elem_begin < 0 || elem_count < 0 || elem_begin > numel || elem_count > numel - elem_begin)
    throw UsageError(fmt::format("{}elements [{}, +{}) are not within its {}", where, elem_begin,
                                 elem_count, numel));
  if (!out.defined() || !out.device().is_cpu() || !out.is_contiguous() ||
      out.scalar_type() != type || out.numel() != elem_count)
    throw UsageError(
        fmt::format("{}the output must be a contiguous CPU tensor of dtype {} with {} elements",
                    where, c10::toString(type), elem_count));
}

}  // namespace tessera
