#include "fsdp/gradients.h"

#include <algorithm>

#include <fmt/format.h>

#include "memory/heap.h"
#include "memory/placement_allocator.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "sharding/gradients/backward_watch.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

// Reductions at the same time. Between hosts one may take longer than a unit's backward, which is
// not delayed for it.
constexpr size_t kMaxOpen = 2, kMaxOpenBetweenHosts = 3;

/// [Note: large parameters] A parameter of at least this size that is most of its unit (a tied
/// embedding) determines the peak of a rank's memory. Its whole gradient is there during the whole
/// backward if it is tied. So the memory of gradients is the system's while it holds none:
/// - that of the shards' gradients from the forward before which they were cleared,
/// - what backward has freed, while the last units are left, which is when most gradients of shards
///   are there,
/// - the flat buffers of other units, from the last two on,
/// - the gradient's own memory as it moves, if nothing else uses it,
/// - the flat buffer once it is reduced.
/// The cost is page faults in the next step.
constexpr int64_t kLargeParameterBytes = 64 << 20;
constexpr size_t kFewLeft = 2;  // units whose reductions do not overlap the next one

std::vector<size_t> flats_of_parameters(const ShardedModel& model) {
  std::vector<size_t> flats;
  for (const auto& place : model.places) flats.push_back(place.flat);
  return flats;
}

/// Values that travel exactly use the groups of the gathers.
sharding::Lanes lanes_of(const ShardedModel& model, WireFormat wire) {
  const bool as_gathers =
      wire == WireFormat::float32 && model.gathers.group(0).impl() == model.shard_group.impl();
  return as_gathers ? model.gathers : sharding::Lanes(model.shard_group, wire, 1);
}

}  // namespace

Gradients::Gradients(ShardedModel& model, FsdpStats& stats, JoinLeader& join_leader,
                     WireFormat wire, Callbacks callbacks)
    : model_(model),
      shard_wire_(lanes_of(model, wire)),
      replica_wire_(sharding::Lanes(model.replicas, wire, 1)),
      max_open_(model.shard_group.same_host() ? kMaxOpen : kMaxOpenBetweenHosts),
      stats_(stats),
      join_leader_(join_leader),
      callbacks_(std::move(callbacks)),
      placeholders_(model.parameters, fmt::format("{}: rank {}", kName, model.world.rank()),
                    "Optimizer(fsdp.parameters(), …), fsdp.clip_grad_norm_(…), or .grad() of "
                    "fsdp.named_parameters()",
                    [this](size_t parameter) { zero(parameter); }),
      norms_([this] { refuse_own_norms(); }, [this] { return shard_gradients(); }),
      pending_(model.flats.size()),
      tracker_(flats_of_parameters(model), model.flats.size()),
      stream_(model.flats.empty() ? at::Device(at::kCPU) : model.flats[0].device) {
  std::vector<at::Tensor> parameters;
  for (const auto& parameter : model_.parameters) parameters.push_back(parameter.tensor);
  placement_.follow(std::move(parameters));
  for (size_t f = 0; f < pending_.size(); ++f) {
    pending_[f].has.assign(model_.flats[f].members.size(), 0);
    pending_[f].placed = pending_[f].has;
    for (const auto i : model_.flats[f].members) {
      pending_[f].defer_until_complete |=
          model_.flats[f].trainable &&
          2 * model_.parameters[i].tensor.numel() > model_.flats[f].layout.numel();
    }
    has_large_ |= model_.flats[f].trainable && is_large(f);
  }
}

void Gradients::begin_forward(bool trains) {
  std::lock_guard lock(mutex_);
  refuse_set_gradients();
  if (!trains) return;
  forwards_ += sync();
  return_cleared();
}

/// The program must not take `.grad` of the module's parameters for the gradients.
void Gradients::refuse_set_gradients() {
  const auto text = placeholders_.set_by_program();
  if (!text.empty()) model_.world.fail(text);
}

void Gradients::begin_backward() {
  std::lock_guard lock(mutex_);
  notice();
  placeholders_.take_away();
  for (auto& pending : pending_) std::fill(pending.placed.begin(), pending.placed.end(), 0);
  placement_.begin();
}

void Gradients::notice_cleared() {
  std::lock_guard lock(mutex_);
  notice();
}

void Gradients::notice() {
  refuse_set_gradients();
  placeholders_.notice([this](size_t parameter) {
    const auto [f, member] = model_.places[parameter];
    model_.flats[f].shards[member].tensor.mutable_grad() = at::Tensor();
    auto& has = pending_[f].has;
    has[member] = 0;
    if (std::count(has.begin(), has.end(), 1) == 0) drop(f);
  });
}

void Gradients::show_placeholders() {
  for (size_t f = 0; f < pending_.size(); ++f) {
    const auto& flat = model_.flats[f];
    for (size_t m = 0; m < flat.members.size(); ++m) {
      if (pending_[f].has[m] || flat.shards[m].tensor.grad().defined())
        placeholders_.show(flat.members[m]);
    }
  }
}

void Gradients::zero(size_t parameter) {
  std::lock_guard lock(mutex_);
  const at::NoGradGuard no_grad;
  const auto [f, member] = model_.places[parameter];
  const auto& grad = model_.flats[f].shards[member].tensor.grad();
  if (grad.defined()) grad.zero_();
  if (pending_[f].has[member]) pending_[f].views[member].zero_();
}

void Gradients::begin(size_t f) {
  auto& flat = model_.flats[f];
  auto& pending = pending_[f];
  if (pending.flat.defined()) return;
  drop_early();
  join_leader_.broadcast_event(FirstGradient{sync(), f});
  while (sync() && open_.size() >= max_open_) finish_one();
  if (sync() && pending.defer_until_complete) callbacks_.complete(flat.unit);
  if (has_large_) return_free_memory(f);
  pending.flat = flat.gradient_slots->take(flat.layout.numel());
  for (size_t m = 0; m < flat.members.size(); ++m) {
    pending.views.push_back(sharding::window(pending.flat, flat.layout.offset(m),
                                             model_.parameters[flat.members[m]].tensor));
    if (has_window(f, m)) placement_.set_window(flat.members[m], pending.views.back());
  }
  stats_.gradient_bytes += static_cast<int64_t>(pending.flat.nbytes());
  stats_.peak_gradient_bytes = std::max(stats_.peak_gradient_bytes, stats_.gradient_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.gathered_bytes + stats_.gradient_bytes);
}

/// Whether gradients of this member may be computed in the flat buffer.
bool Gradients::has_window(size_t f, size_t member) const {
  const auto& flat = model_.flats[f];
  const auto& parameter = model_.parameters[flat.members[member]].tensor;
  const auto bytes = static_cast<int64_t>(c10::elementSize(flat.reduce));
  return flat.trainable && flat.device.is_cpu() && !pending_[f].defer_until_complete &&
         parameter.scalar_type() == flat.reduce &&
         sharding::may_be_window(flat.layout.offset(member) * bytes, parameter.nbytes());
}

/// Gradients can be computed in the flat buffer only if the unit has one. So the unit that was
/// reduced after `f` in the last backward gets its buffer now, not with its first gradient. All
/// ranks do so at the same place in the order of their reductions.
void Gradients::begin_next(size_t f) {
  if (join_leader_.some_rank_has_no_data()) return;  // they take buffers when they are told to
  auto next = std::find(last_order_.begin(), last_order_.end(), f);
  if (next == last_order_.end() || ++next == last_order_.end()) return;
  const auto& flat = model_.flats[*next];
  auto& pending = pending_[*next];
  // The buffers of gathered parameters are not free until the last use.
  if (pending.flat.defined() || pending.reduced || flat.gradient_slots == flat.compute.slots)
    return;
  bool any = false;
  for (size_t m = 0; m < flat.members.size(); ++m) any = any || has_window(*next, m);
  if (!any) return;
  begin(*next);
  pending.early = true;
  early_ = *next;
}

void Gradients::arrived(size_t parameter, const at::Tensor& computed) {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  const auto [f, member] = model_.places[parameter];
  const auto& grad = gradient_of(f, member);
  if (!grad.defined()) return;
  const auto& name = model_.parameters[parameter].name;
  sharding::check_gradient(kName, name, grad, model_.world.rank());
  if (grad.requires_grad())
    throw UsageError(fmt::format(
        "{}: rank {}: this backward has create_graph, and .grad of the shard of parameter {} has "
        "no graph; expected torch::autograd::grad(…, create_graph) over the module's parameters or "
        "inputs, DistributedDataParallel or ZeroRedundancyOptimizer",
        kName, model_.world.rank(), name));
  auto& pending = pending_[f];
  tracker_.arrive(parameter);
  const bool complete = tracker_.complete(f);
  if (sync() && pending.defer_until_complete && !pending.flat.defined() && !complete) return;
  if (pending.defer_until_complete) take_all(f, member, computed);
  else take(f, member, computed);
  if (!complete) return;
  if (sync()) reduce(f);
  begin_next(f);
}

/// Moves `.grad` of a parameter of the module to the flat buffer, unless it is there already.
void Gradients::take(size_t f, size_t member, const at::Tensor& computed) {
  auto& grad = gradient_of(f, member);
  if (!grad.defined()) return;
  begin(f);
  auto& pending = pending_[f];
  const auto parameter = model_.flats[f].members[member];
  placement_.arrived(parameter, grad);
  const bool in_place = !pending.has[member] && sharding::same_memory(grad, pending.views[member]);
  if (in_place && sharding::held_by_autograd(grad, computed)) {
    pending.placed[member] = 1;
    ++stats_.gradients_in_place;
  } else {
    if (!pending.has[member] && memory::is_placed(pending.views[member])) displace(f);
    ++stats_.gradients_copied;
    if (pending.has[member]) pending.views[member].add_(grad);
    else if (may_move(f, parameter, grad, computed)) sharding::move_to(grad, pending.views[member]);
    else sharding::place(grad, pending.views[member]);
  }
  placement_.set_window(parameter, {});
  pending.has[member] = 1;
  pending.early = false;
  grad = at::Tensor();
}

/// If other tensors use memory of the flat buffer, by a wrong prediction, the gradients move to a
/// private one.
void Gradients::displace(size_t f) {
  auto& flat = model_.flats[f];
  auto& pending = pending_[f];
  std::vector<size_t> mispredicted;
  std::vector<at::Tensor> occupied;
  for (size_t m = 0; m < flat.members.size(); ++m) {
    if (pending.placed[m] || !memory::is_placed(pending.views[m])) continue;
    mispredicted.push_back(flat.members[m]);
    occupied.push_back(pending.views[m]);
  }
  if (occupied.empty()) return;
  placement_.end(false);  // this backward is not like the last one
  placement_.exclude(mispredicted);
  pending.flat = flat.gradient_slots->displace(pending.flat, std::move(occupied));
  for (size_t m = 0; m < flat.members.size(); ++m) {
    placement_.set_window(flat.members[m], {});
    const auto before = std::exchange(pending.views[m],
                                      sharding::window(pending.flat, flat.layout.offset(m),
                                                       model_.parameters[flat.members[m]].tensor));
    if (pending.has[m]) pending.views[m].copy_(before);
  }
}

/// `computed`: of the member that has just arrived.
void Gradients::take_all(size_t f, size_t arrived, const at::Tensor& computed) {
  for (size_t m = 0; m < pending_[f].has.size(); ++m)
    take(f, m, m == arrived ? computed : at::Tensor());
}

/// Whether `grad`, which is `.grad` of the parameter, is large and nothing reads its memory after
/// it was copied.
bool Gradients::may_move(size_t f, size_t parameter, const at::Tensor& grad,
                         const at::Tensor& computed) const {
  if (!is_large(f) || grad.layout() != at::kStrided || grad.use_count() != 1) return false;
  if (computed.defined() && !sharding::BackwardWatch::is_alone(model_.parameters[parameter].tensor))
    return false;
  return grad.storage().use_count() == 1 || sharding::held_by_autograd(grad, computed);
}

at::Tensor& Gradients::gradient_of(size_t f, size_t member) const {
  return const_cast<at::Tensor&>(model_.parameters[model_.flats[f].members[member]].tensor)
      .mutable_grad();
}

bool Gradients::is_large(size_t f) const {
  const auto& flat = model_.flats[f];
  return pending_[f].defer_until_complete &&
         flat.layout.numel() * static_cast<int64_t>(c10::elementSize(flat.reduce)) >=
             kLargeParameterBytes;
}

/// Flat parameters without large ones that this backward has not reduced yet.
size_t Gradients::small_ones_left() const {
  size_t count = 0;
  for (size_t f = 0; f < pending_.size(); ++f)
    count += model_.flats[f].trainable && !pending_[f].reduced && !is_large(f);
  return count;
}

/// See [Note: large parameters]. `f` gets its flat buffer next.
void Gradients::return_free_memory(size_t f) {
  const size_t left = small_ones_left();
  if (sync() && left <= kFewLeft) {
    while (!open_.empty()) finish_one();
    for (const auto& flat : model_.flats) {
      if (flat.trainable && flat.gradient_slots != flat.compute.slots)
        flat.gradient_slots->return_pages_of_free();
    }
  }
  // Each call costs page faults in the next unit, so there are few.
  if (is_large(f) || (left & (left - 1)) == 0) memory::return_freed_memory();
}

void Gradients::return_cleared() {
  if (!has_large_) return;
  for (size_t f = 0; f < pending_.size(); ++f) {
    const auto& pending = pending_[f];
    const auto& own = pending.own_segment;
    if (!own.defined() || !model_.flats[f].device.is_cpu()) continue;
    // The program may hold a gradient that it has cleared.
    const auto& storage = (pending.page ? pending.page->flat() : own).storage();
    if (storage.use_count() == 1)
      memory::return_pages(own.data_ptr(), static_cast<int64_t>(own.nbytes()));
  }
}

bool Gradients::only_large_parameters_are_left() const {
  bool any = false;
  for (size_t f = 0; f < pending_.size(); ++f) {
    if (!model_.flats[f].trainable || pending_[f].reduced) continue;
    if (!is_large(f)) return false;
    any = true;
  }
  return any;
}

at::Tensor Gradients::window(size_t f, size_t member) const {
  const auto& shard = model_.flats[f].shards[member];
  return sharding::window(pending_[f].own_segment, shard.at, shard.tensor);
}

at::Tensor Gradients::shard_gradient(size_t f, size_t member) const {
  if (!pending_[f].page) return window(f, member);
  const sharding::NoDetection no_detection;
  const auto& shard = model_.flats[f].shards[member];
  return sharding::window(pending_[f].page->flat(), shard.at, shard.tensor);
}

std::set<sharding::LocalNorms::Gradient> Gradients::shard_gradients() const {
  std::set<sharding::LocalNorms::Gradient> result;
  for (size_t f = 0; f < pending_.size(); ++f) {
    for (const auto& shard : model_.flats[f].shards) {
      if (shard.tensor.grad().defined()) result.emplace(f, shard.at);
    }
  }
  return result;
}

void Gradients::refuse_own_norms() const {
  throw UsageError(fmt::format(
      "{}: rank {}: the gradients of the shards are scaled by a norm of this rank's elements only "
      "(torch::nn::utils::clip_grad_norm_ over fsdp.parameters()?); expected "
      "fsdp.clip_grad_norm_(…), whose norm is that of all ranks",
      kName, model_.world.rank()));
}

void Gradients::shadow_gradient(size_t f) {
  std::lock_guard lock(mutex_);
  begin(f);
}

void Gradients::shadow_reduce(const GradientsReduced& event) {
  std::lock_guard lock(mutex_);
  auto& pending = pending_[event.flat];
  forwards_ = event.forwards;
  for (size_t m = 0; m < pending.has.size(); ++m) {
    if (!pending.has[m]) pending.views[m].zero_();
    pending.has[m] = event.used.at(m);
  }
  reduce(event.flat);
}

/// The next backward starts without arrivals, even after an error in this one.
struct Gradients::EndOfBackward {
  Gradients& gradients;
  ~EndOfBackward() { gradients.tracker_.begin(); }
};

bool Gradients::finish() {
  std::lock_guard lock(mutex_);
  const EndOfBackward end{*this};
  placement_.end(true);
  bool reduced = take_reduced();
  norms_.reset();
  drop_early();
  if (sync()) {
    reduce_rest();
    reduced = take_reduced() || reduced;
    if (reduced) ++backwards_;
    if (reduced) last_order_ = order_;
  }
  wait_for_host_sums();
  order_.clear();
  show_placeholders();
  return reduced;
}

void Gradients::abandon() {
  std::lock_guard lock(mutex_);
  placement_.end(false);
  order_.clear();
  for (auto& reduction : open_) {
    reduction->dropped = true;
    settle(*reduction);
  }
  for (size_t f = 0; f < pending_.size(); ++f) {
    for (size_t m = 0; m < pending_[f].has.size(); ++m) gradient_of(f, m) = at::Tensor();
  }
  drop();
  wait_for_host_sums();
  for (auto& pending : pending_) pending.reduced = false;
  tracker_.begin();
  show_placeholders();
}

void Gradients::zero_grad(bool set_to_none) {
  std::lock_guard lock(mutex_);
  at::NoGradGuard no_grad;
  notice();
  if (set_to_none) placeholders_.take_away();
  drop();
  for (auto& flat : model_.flats) {
    for (auto& shard : flat.shards) {
      auto& grad = shard.tensor.mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none) grad = at::Tensor();
      else grad.zero_();
    }
  }
}

/// The unit that got its buffer early has no gradient: this backward is not like the last one.
void Gradients::drop_early() {
  if (early_ && pending_[*early_].early) drop(*early_);
  early_.reset();
}

/// Drops the gradients that are accumulated and not reduced.
void Gradients::drop() {
  for (size_t f = 0; f < pending_.size(); ++f) drop(f);
}

void Gradients::drop(size_t f) {
  auto& pending = pending_[f];
  if (!pending.flat.defined()) return;
  displace(f);
  stats_.gradient_bytes -= static_cast<int64_t>(pending.flat.nbytes());
  model_.flats[f].gradient_slots->give(pending.flat);
  forget(f);
}

/// The flat buffer is no longer that of `f`.
void Gradients::forget(size_t f) {
  auto& pending = pending_[f];
  for (const auto i : model_.flats[f].members) placement_.set_window(i, {});
  pending.flat = at::Tensor();
  pending.views.clear();
  pending.early = false;
  std::fill(pending.has.begin(), pending.has.end(), 0);
  // A unit that is reduced again in this backward gets another buffer.
  std::fill(pending.placed.begin(), pending.placed.end(), 0);
}

int64_t Gradients::shard_bytes() const {
  int64_t bytes = 0;
  for (const auto& pending : pending_) {
    if (pending.own_segment.defined()) bytes += static_cast<int64_t>(pending.own_segment.nbytes());
  }
  return bytes;
}

}  // namespace tessera::fsdp
