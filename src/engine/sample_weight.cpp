#include "tessera/step/sample_weight.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera {

double sample_weight(ProcessGroup group, int64_t samples) {
  const at::Tensor sums =
      at::tensor({samples, int64_t{samples < 0}}, at::kLong).to(group.control_device());
  group.all_reduce(sums, 1, "sample_weight");
  const at::Tensor on_host = sums.cpu();
  if (on_host[1].item<int64_t>() > 0)
    throw UsageError(
        fmt::format("sample_weight: rank {}: {} samples{}; expected 0 or more on every rank",
                    group.rank(), samples, samples < 0 ? "" : ", and fewer than 0 on another one"));
  const auto all = static_cast<double>(on_host[0].item<int64_t>());
  return all == 0 ? 0 : group.size() * static_cast<double>(samples) / all;
}

}  // namespace tessera
