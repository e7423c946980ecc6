#include "fsdp/gradient_buffers.h"

#include <algorithm>
#include <utility>

#include "memory/heap.h"
#include "memory/placement_allocator.h"
#include "sharding/bucket.h"

namespace tessera::fsdp {

namespace {

constexpr int64_t kLargeParameterBytes = 64 << 20;

at::Tensor gradient_view(const FlatParameter& flat, size_t member) {
  return sharding::window(flat.gradients.flat, flat.layout.offset(member), flat.parameters[member]);
}

/// True if `grad`, which is `.grad` of the parameter, is large and nothing reads its memory after
/// it was copied.
bool may_move(const FlatParameter& flat, const at::Tensor& parameter, const at::Tensor& grad,
              const at::Tensor& computed) {
  if (!is_large(flat) || grad.layout() != at::kStrided || grad.use_count() != 1) return false;
  if (computed.defined() && !sharding::BackwardWatch::is_alone(parameter)) return false;
  return grad.storage().use_count() == 1 || sharding::held_by_autograd(grad, computed);
}

}  // namespace

bool is_mostly_one_parameter(const FlatParameter& flat) {
  return std::any_of(flat.parameters.begin(), flat.parameters.end(), [&](const auto& parameter) {
    return 2 * parameter.numel() > flat.layout.numel();
  });
}

GradientBuffers::GradientBuffers(ShardedModel& model, FsdpStats& stats)
    : model_(model), stats_(stats) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model.parameters) parameters.push_back(parameter.tensor);
  placement_.follow(std::move(parameters));
  for (auto* flat : model.flats) {
    auto& gradients = flat->gradients;
    gradients.has.assign(flat->members.size(), 0);
    gradients.placed = gradients.has;
    gradients.defer_until_complete = flat->trainable && is_mostly_one_parameter(*flat);
  }
}

void GradientBuffers::begin_backward() {
  for (auto* flat : model_.flats) {
    auto& placed = flat->gradients.placed;
    std::fill(placed.begin(), placed.end(), 0);
  }
  placement_.begin();
}

void GradientBuffers::begin(FlatParameter& flat) {
  auto& gradients = flat.gradients;
  const auto numel = flat.layout.numel();
  gradients.flat =
      model_.diverged ? gradients.slots->take_private(numel) : gradients.slots->take(numel);
  for (size_t m = 0; m < flat.members.size(); ++m) {
    gradients.views.push_back(gradient_view(flat, m));
    if (has_window(flat, m)) placement_.set_window(flat.members[m], gradients.views.back());
  }
  stats_.gradient_bytes += static_cast<int64_t>(gradients.flat.nbytes());
  stats_.peak_gradient_bytes = std::max(stats_.peak_gradient_bytes, stats_.gradient_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.gathered_bytes + stats_.gradient_bytes);
}

bool GradientBuffers::has_window(const FlatParameter& flat, size_t member) const {
  const auto& parameter = flat.parameters[member];
  const auto bytes = static_cast<int64_t>(c10::elementSize(flat.reduce));
  return flat.trainable && flat.device.is_cpu() && !flat.gradients.defer_until_complete &&
         parameter.scalar_type() == flat.reduce &&
         sharding::may_be_window(flat.layout.offset(member) * bytes, parameter.nbytes());
}

bool GradientBuffers::has_windows(const FlatParameter& flat) const {
  for (size_t m = 0; m < flat.members.size(); ++m)
    if (has_window(flat, m)) return true;
  return false;
}

void GradientBuffers::take(FlatParameter& flat, size_t member, const at::Tensor& computed) {
  auto& gradients = flat.gradients;
  auto& view = gradients.views[member];
  auto& grad = flat.parameters[member].mutable_grad();
  const auto parameter = flat.members[member];
  placement_.arrived(parameter, grad);
  const bool in_place = !gradients.has[member] && sharding::same_memory(grad, view);
  if (in_place && sharding::held_by_autograd(grad, computed)) {
    gradients.placed[member] = 1;
    ++stats_.gradients_in_place;
  } else {
    if (!gradients.has[member] && memory::is_placed(view)) displace(flat);
    ++stats_.gradients_copied;
    if (gradients.has[member]) view.add_(grad);
    else if (may_move(flat, flat.parameters[member], grad, computed)) sharding::move_to(grad, view);
    else sharding::place(grad, view);
  }
  placement_.set_window(parameter, {});
  gradients.has[member] = 1;
  gradients.early = false;
  grad = at::Tensor();
}

void GradientBuffers::displace(FlatParameter& flat) {
  auto& gradients = flat.gradients;
  std::vector<size_t> mispredicted;
  std::vector<at::Tensor> occupied;
  for (size_t m = 0; m < flat.members.size(); ++m) {
    if (gradients.placed[m] || !memory::is_placed(gradients.views[m])) continue;
    mispredicted.push_back(flat.members[m]);
    occupied.push_back(gradients.views[m]);
  }
  if (occupied.empty()) return;
  placement_.end(false);  // this backward is not like the last one
  placement_.exclude(mispredicted);
  gradients.flat = gradients.slots->displace(gradients.flat, std::move(occupied));
  for (size_t m = 0; m < flat.members.size(); ++m) {
    placement_.set_window(flat.members[m], {});
    const auto before = std::exchange(gradients.views[m], gradient_view(flat, m));
    if (gradients.has[m]) gradients.views[m].copy_(before);
  }
}

void GradientBuffers::forget(FlatParameter& flat) {
  auto& gradients = flat.gradients;
  for (const auto i : flat.members) placement_.set_window(i, {});
  gradients.flat = at::Tensor();
  gradients.views.clear();
  gradients.early = false;
  std::fill(gradients.has.begin(), gradients.has.end(), 0);
  // A unit that is reduced again in this backward gets another buffer.
  std::fill(gradients.placed.begin(), gradients.placed.end(), 0);
}

void GradientBuffers::take_back(FlatParameter& flat, const at::Tensor& slot,
                                const std::vector<char>& has) {
  auto& gradients = flat.gradients;
  gradients.reduced = false;
  auto views = std::exchange(gradients.views, {});
  const auto later = std::exchange(gradients.flat, slot);
  for (size_t m = 0; m < flat.members.size(); ++m) {
    auto view = gradient_view(flat, m);
    if (later.defined() && gradients.has[m]) has[m] ? view.add_(views[m]) : view.copy_(views[m]);
    gradients.has[m] |= has[m];
    gradients.views.push_back(std::move(view));
  }
  if (!later.defined()) return;
  views.clear();
  stats_.gradient_bytes -= static_cast<int64_t>(later.nbytes());
  gradients.slots->give(later);
}

void GradientBuffers::drop(FlatParameter& flat) {
  if (!flat.gradients.flat.defined()) return;
  displace(flat);
  stats_.gradient_bytes -= static_cast<int64_t>(flat.gradients.flat.nbytes());
  flat.gradients.slots->give(flat.gradients.flat);
  forget(flat);
}

bool is_large(const FlatParameter& flat) {
  return flat.gradients.defer_until_complete &&
         flat.layout.numel() * static_cast<int64_t>(c10::elementSize(flat.reduce)) >=
             kLargeParameterBytes;
}

bool has_large(const ShardedModel& model) {
  return std::any_of(model.flats.begin(), model.flats.end(),
                     [](const auto* flat) { return is_large(*flat); });
}

Unreduced unreduced(const ShardedModel& model) {
  Unreduced left;
  for (const auto* flat : model.flats)
    if (flat->trainable && !flat->gradients.reduced) ++(is_large(*flat) ? left.large : left.small);
  return left;
}

void return_free_slots(const ShardedModel& model) {
  for (const auto* flat : model.flats) {
    auto* const slots = flat->gradients.slots;
    if (flat->trainable && slots != flat->compute.slots) slots->return_pages_of_free();
  }
}

void return_cleared(const ShardedModel& model) {
  for (const auto* flat : model.flats) {
    const auto& own = flat->gradients.own_segment;
    if (!own.defined() || !flat->device.is_cpu()) continue;
    // The program may hold a gradient that it has cleared.
    const auto& page = flat->gradients.page;
    const auto& storage = (page ? page->flat() : own).storage();
    if (storage.use_count() == 1)
      memory::return_pages(own.data_ptr(), static_cast<int64_t>(own.nbytes()));
  }
}

}  // namespace tessera::fsdp
