#include "sharding/module_buffers.h"

#include <numeric>
#include <unordered_set>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"

namespace tessera {

const char* buffer_sync_name(BufferSync rule) {
  switch (rule) {
    case BufferSync::broadcast:
      return "broadcast";
    case BufferSync::mean:
      return "mean";
    case BufferSync::none:
      return "none";
  }
  return "none";
}

namespace sharding {
namespace {

/// The elements of an expanded tensor without their repetitions.
at::Tensor without_repeats(at::Tensor tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  return tensor;
}

}  // namespace

ModuleBuffers::ModuleBuffers(const torch::nn::Module& module, BufferSync rule) : rule_(rule) {
  std::unordered_set<const void*> seen;
  for (const auto& buffer : module.named_buffers()) {
    if (!buffer.value().defined() || !seen.insert(buffer.value().unsafeGetTensorImpl()).second)
      continue;
    materialize(buffer.value());
    buffers_.push_back({buffer.key(), buffer.value()});
  }
}

std::vector<std::vector<size_t>> ModuleBuffers::classes() const {
  std::vector<size_t> all(buffers_.size());
  std::iota(all.begin(), all.end(), 0);
  return by_dtype_and_device(buffers_, all);
}

std::vector<std::string> ModuleBuffers::signatures() const {
  std::vector<std::string> lines;
  for (const auto& buffer : buffers_) lines.push_back("buffer " + signature(buffer));
  lines.push_back(fmt::format("option buffers: {}", buffer_sync_name(rule_)));
  return lines;
}

void ModuleBuffers::broadcast(ProcessGroup& group, int root) const {
  for (const auto& [name, tensor] : buffers_) {
    if (group.size() == 1 || tensor.layout() == at::kStrided) continue;
    throw UsageError(fmt::format(
        "rank {}: buffer {} of the module has the layout {}, and ranks exchange dense buffers; "
        "expected a dense one, or a member that is not registered as a buffer",
        group.rank(), name, c10::str(tensor.layout())));
  }
  for (const auto& members : classes())
    combine(group, members, Combine::copy, root, group.rank() == root);
}

void ModuleBuffers::synchronize(ProcessGroup& group, bool has_data) const {
  if (rule_ == BufferSync::none) return;
  for (const auto& members : classes()) {
    const bool averages =
        rule_ == BufferSync::mean && at::isFloatingType(buffers_[members[0]].tensor.scalar_type());
    combine(group, members, averages ? Combine::mean : Combine::copy, publisher_, has_data);
  }
}

void ModuleBuffers::combine(ProcessGroup& group, const std::vector<size_t>& members, Combine how,
                            int root, bool has_data) const {
  if (group.size() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> parts;
  for (const auto i : members)
    parts.push_back(without_repeats(buffers_[i].tensor.detach()).reshape({-1}));
  auto flat = at::cat(parts);
  if (how == Combine::mean) {
    if (!has_data) flat.zero_();
    group.all_reduce(flat, 1.0 / (active_ranks_ > 0 ? active_ranks_ : group.size()));
  } else {
    group.broadcast(flat, root, "buffers");
  }
  at::AutoDispatchBelowADInplaceOrView keep_versions;
  int64_t offset = 0;
  for (const auto i : members) {
    auto tensor = without_repeats(buffers_[i].tensor);
    tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

void ModuleBuffers::set_active(int publisher, int active_ranks) {
  publisher_ = publisher;
  active_ranks_ = active_ranks;
}

void report_no_module(const char* component, const ProcessGroup& group) {
  if (group.rank() != 0 || group.size() == 1) return;
  spdlog::warn(
      "tessera: {0} was made from parameter groups alone, so a module's buffers (running "
      "statistics) may differ between ranks; expected {0}(module, groups, …) or "
      "track_buffers(module), or the option buffers none",
      component);
}

}  // namespace sharding
}  // namespace tessera
