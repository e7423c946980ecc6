#include "sharding/gradients/gradient_wire.h"

#include <cmath>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::sharding {

void check_wire_dtypes(const std::string& component, int rank, const WireOptions& wire,
                       const std::vector<NamedTensor>& parameters) {
  if (wire == WireOptions()) return;
  for (const auto& [name, tensor] : parameters) {
    const auto dtype = tensor.scalar_type();
    if (dtype != at::kDouble && dtype != at::kComplexDouble) continue;
    throw UsageError(fmt::format(
        "{}: rank {}: option wire ({}): parameter {} has dtype {}; expected float32, bfloat16 or "
        "float16",
        component, rank, to_string(wire), name, c10::toString(dtype)));
  }
}

void check_scale_change(const std::string& component, int rank, double factor) {
  if (std::isfinite(factor) && factor > 0) return;
  throw UsageError(
      fmt::format("{}: rank {}: end_step: scale is {}; expected a positive number, the new scale "
                  "of the loss / the old one",
                  component, rank, factor));
}

void refuse_parameter_wire(const std::string& component, int rank, const WireOptions& wire) {
  if (wire.parameters == WireFormat::float32) return;
  throw UsageError(
      fmt::format("{}: rank {}: option wire.parameters is {}, but every rank updates all "
                  "parameters, so none travel; expected float32",
                  component, rank, to_string(wire.parameters)));
}

}  // namespace tessera::sharding
