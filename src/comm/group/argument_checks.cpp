#include "comm/group/argument_checks.h"

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>

#include "tessera/detail/resolved.h"
#include "tessera/error.h"

namespace tessera {

void require(bool condition, const ProcessGroup::Impl& impl, const char* method,
             const std::string& problem) {
  if (!condition)
    throw UsageError(fmt::format("ProcessGroup.{}: rank {}: {}", method, impl.world.rank, problem));
}

void check_root(const ProcessGroup::Impl& impl, const char* method, int root) {
  require(root >= 0 && root < impl.world.size, impl, method,
          fmt::format("root is {}; expected 0 to {}", root, impl.world.size - 1));
}

void check_tensor(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor) {
  require(tensor.defined(), impl, method, "the tensor is undefined; expected a dense tensor");
  require(tensor.layout() == at::kStrided, impl, method,
          "the tensor is sparse; expected a dense tensor");
  require(!tensor.is_quantized(), impl, method,
          "the tensor is quantized, and its scale would not travel; expected its int_repr()");
  if (impl.alone() || tensor.device().is_cpu()) return;
  const auto device = impl.transport->device_type();
  require(tensor.device().type() == device, impl, method,
          fmt::format("the tensor is on {}, but backend {} moves CPU tensors{}",
                      tensor.device().str(), impl.transport->name(),
                      device == at::kCPU ? "" : " and tensors on " + at::Device(device).str()));
}

void check_sum(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor,
               double scale) {
  check_tensor(impl, method, tensor);
  require(
      tensor.scalar_type() != at::kBool && !tensor.is_complex(), impl, method,
      fmt::format("sums of dtype {} are not defined; expected a floating-point or integer dtype",
                  c10::toString(tensor.scalar_type())));
  require(scale == 1 || tensor.is_floating_point(), impl, method,
          fmt::format("scale is {} for dtype {}; expected 1, or a floating-point dtype", scale,
                      c10::toString(tensor.scalar_type())));
}

void check_apart(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& output,
                 const at::Tensor& input) {
  require(at::get_overlap_status(output.detach(), input) == at::MemOverlapStatus::No, impl, method,
          "output and input share memory; expected tensors that do not overlap");
}

void check_counts(const ProcessGroup::Impl& impl, const char* method, const char* name,
                  const std::vector<int64_t>& counts, const at::Tensor& tensor) {
  require(static_cast<int>(counts.size()) == impl.world.size, impl, method,
          fmt::format("{} has {} entries; expected one for each of {} ranks", name, counts.size(),
                      impl.world.size));
  int64_t total = 0;
  for (const auto count : counts) {
    require(count >= 0 && count <= tensor.numel(), impl, method,
            fmt::format("{} has the entry {}; expected 0 to {}", name, count, tensor.numel()));
    total += count;
  }
  require(total == tensor.numel(), impl, method,
          fmt::format("{} add up to {}; expected the tensor's {} elements", name, total,
                      tensor.numel()));
  require(tensor.dim() == 1 && tensor.is_contiguous() && detail::is_resolved(tensor), impl, method,
          "the tensor must be one-dimensional and contiguous, and no conjugate or negative view");
}

void check_wire(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor) {
  require(impl.world.wire == WireFormat::float32 || tensor.scalar_type() != at::kDouble, impl,
          method,
          fmt::format("dtype Double cannot travel as {}; expected float32, bfloat16 or float16",
                      to_string(impl.world.wire)));
}

}  // namespace tessera
