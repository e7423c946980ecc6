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
/// embedding) determines the peak of a rank's memory. Memory that backward has freed is returned to
/// the system before its gradient arrives and again before it moves to the flat buffer. If nothing
/// else uses the gradient, its memory is returned as it moves. The flat buffer is returned once it
/// is reduced. The cost is page faults in the next step.
constexpr int64_t kLargeParameterBytes = 64 << 20;

/// A short text that identifies the parameters with gradients, so that a difference between ranks
/// is detected.
std::string digest(const std::vector<char>& used) {
  uint64_t hash = 1469598103934665603ull;
  for (const char bit : used) hash = (hash ^ static_cast<uint64_t>(bit)) * 1099511628211ull;
  return fmt::format("{} of {} parameters used, set {:04x}",
                     std::count(used.begin(), used.end(), 1), used.size(), hash & 0xffff);
}

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
  }
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
  if (is_large(f)) memory::return_freed_memory();  // of gradients that autograd has added up
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
  sharding::check_gradient("FullyShardedDataParallel", model_.parameters[parameter].name, grad,
                           model_.world.rank());
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

void Gradients::reduce(size_t f) {
  auto& flat = model_.flats[f];
  auto& pending = pending_[f];
  if (join_leader_.must_broadcast())
    join_leader_.broadcast_event(GradientsReduced{f, forwards_, pending.has});
  const auto same = [f](const auto& open) { return open->flat == f; };
  while (std::any_of(open_.begin(), open_.end(), same)) finish_one();  // this reduction adds to it
  displace(f);
  order_.push_back(f);
  auto reduction = std::make_shared<Reduction>();
  reduction->flat = f;
  reduction->slot = pending.flat;
  reduction->used = pending.has;
  const int64_t own = flat.layout.counts()[model_.shard_group.rank()];
  if (!pending.own_segment.defined()) {
    auto options = flat.own_segment.options();
    if (flat.device != flat.own_segment.device()) options = options.pinned_memory(true);
    pending.own_segment = at::empty({own}, options);
    if (model_.shard_group.size() > 1) {
      pending.page =
          std::make_unique<sharding::Page>(&norms_, f, own, flat.own_segment.options(), "");
      pending.page->attach(pending.own_segment);
    }
  }
  for (size_t m = 0; m < flat.members.size(); ++m) {
    auto& grad = flat.shards[m].tensor.mutable_grad();
    auto mine = window(f, m);
    if (grad.defined() && grad.data_ptr() != mine.data_ptr())
      mine.copy_(grad);  // set by the caller
    reduction->adds.push_back(grad.defined());
  }
  // Ranks that have made different numbers of passes would reduce gradients of different steps.
  const auto tag = fmt::format("gradients of unit {}: {}; backward {} after {} forwards",
                               display_name(model_.units[flat.unit]), digest(pending.has),
                               backwards_ + 1, forwards_);
  const double scale = 1.0 / join_leader_.divisor();
  reduction->scale =
      model_.replicas.size() > 1 ? 1 : scale;  // with replicas, their sum applies the scale
  const auto all = [](const std::vector<char>& flags, char value) {
    return std::count(flags.begin(), flags.end(), value) == static_cast<int64_t>(flags.size());
  };
  const bool directly = model_.replicas.size() == 1 && flat.reduce == flat.dtype &&
                        flat.device == flat.own_segment.device() && all(reduction->used, 1) &&
                        all(reduction->adds, 0);
  {
    const comm::CommStream::Scope on_comm_stream(stream_);
    auto shard_group = shard_wire_.group(order_.size() - 1), replicas = replica_wire_.group();
    const auto feedback = shard_wire_.scope(f);
    if (model_.replicas.size() > 1) {
      reduction->part = at::empty({own}, flat.gradient_options());
      auto sum = shard_group.reduce_scatter_each_async(
          pending.flat, flat.layout.counts(),
          [part = reduction->part](int64_t offset, const at::Tensor& run) {
            part.narrow(0, offset, run.numel()).copy_(run);
          },
          tag);
      sum.wait();
      const auto replica_feedback = replica_wire_.scope(f);
      reduction->work = replicas.all_reduce_async(reduction->part, scale, tag);
    } else if (directly) {
      reduction->work = shard_group.reduce_scatter_into_async(pending.flat, flat.layout.counts(),
                                                              pending.own_segment, scale, tag);
    } else {
      reduction->work = shard_group.reduce_scatter_each_async(
          pending.flat, flat.layout.counts(),
          callback_guard_.guard(
              [this, reduction = reduction.get()](int64_t offset, const at::Tensor& run) {
                add(*reduction, offset, run);
              }),
          tag);
    }
    reduction->mark = stream_.mark();
  }
  open_.push_back(reduction);
  ++stats_.reductions;
  for (size_t m = 0; m < flat.members.size(); ++m) {
    const auto parameter = flat.members[m];
    tracker_.expect(parameter, pending.has[m] || tracker_.arrivals(parameter) > 0);
  }
  forget(f);
  pending.reduced = true;
  if (only_large_parameters_are_left()) memory::return_freed_memory();
  callbacks_.reduced(flat.unit);
}

bool Gradients::is_large(size_t f) const {
  const auto& flat = model_.flats[f];
  return pending_[f].defer_until_complete &&
         flat.layout.numel() * static_cast<int64_t>(c10::elementSize(flat.reduce)) >=
             kLargeParameterBytes;
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

/// Adds or copies a part of the sum, which begins at `offset` of the own segment, to the gradients
/// of the shards in it.
void Gradients::add(Reduction& reduction, int64_t offset, const at::Tensor& sum) {
  if (reduction.dropped) return;
  at::NoGradGuard no_grad;
  const auto& flat = model_.flats[reduction.flat];
  auto& segment = pending_[reduction.flat].own_segment;
  const int64_t end = offset + sum.numel();
  for (size_t m = 0; m < flat.shards.size(); ++m) {
    if (!reduction.used[m]) continue;
    const int64_t from = std::max(offset, flat.shards[m].at);
    int64_t to = std::min(end, flat.shards[m].at + flat.shards[m].numel);
    if (from >= to) continue;
    while (m + 1 < flat.shards.size() && to < end && reduction.used[m + 1] &&
           reduction.adds[m + 1] == reduction.adds[m]) {
      ++m;
      to = std::min(end, flat.shards[m].at + flat.shards[m].numel);
    }
    auto target = segment.narrow(0, from, to - from);
    const auto part = sum.narrow(0, from - offset, to - from);
    const bool adds = reduction.adds[m];
    if (part.device() != target.device()) {
      reduction.on_the_way.send(target, part, adds, reduction.scale);
    } else if (adds) {
      target.add_(part, reduction.scale);
    } else {
      target.copy_(part).mul_(reduction.scale);
    }
  }
}

/// Waits once for all sums of the backward.
void Gradients::wait_for_host_sums() {
  if (on_the_way_.empty()) return;
  stream_.wait_for_current();
  on_the_way_.apply();
}

void Gradients::finish_one() {
  auto reduction = open_.front();
  open_.pop_front();
  auto& flat = model_.flats[reduction->flat];
  advised([&] { reduction->work.wait(); });
  stream_.join(reduction->mark);
  const at::NoGradGuard no_grad;
  if (reduction->part.defined()) add(*reduction, 0, reduction->part);
  if (!reduction->dropped) {
    on_the_way_.take(reduction->on_the_way);
    shard_wire_.commit(reduction->flat);
    replica_wire_.commit(reduction->flat);
  }
  for (size_t m = 0; m < flat.members.size(); ++m) {
    if (reduction->used[m] && !reduction->dropped)
      flat.shards[m].tensor.mutable_grad() = shard_gradient(reduction->flat, m);
  }
  stats_.gradient_bytes -= static_cast<int64_t>(reduction->slot.nbytes());
  flat.gradient_slots->give(reduction->slot, !is_large(reduction->flat));
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

/// Whatever happens in it, the next backward starts without arrivals.
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

/// Whether a unit was reduced since the last call.
bool Gradients::take_reduced() {
  bool any = false;
  for (auto& pending : pending_) any = std::exchange(pending.reduced, false) || any;
  return any;
}

void Gradients::reduce_rest() {
  for (size_t f = 0; f < pending_.size(); ++f) {
    if (!model_.flats[f].trainable ||
        !(pending_[f].defer_until_complete || pending_[f].flat.defined()))
      continue;
    const at::NoGradGuard no_grad;
    if (pending_[f].defer_until_complete) take_all(f, 0, {});
    if (pending_[f].flat.defined()) reduce(f);
  }
  while (!open_.empty()) finish_one();
}

void Gradients::abandon() {
  std::lock_guard lock(mutex_);
  placement_.end(false);
  order_.clear();
  for (auto& reduction : open_) reduction->dropped = true;
  for (size_t f = 0; f < pending_.size(); ++f) {
    for (size_t m = 0; pending_[f].defer_until_complete && m < pending_[f].has.size(); ++m)
      gradient_of(f, m) = at::Tensor();
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
