#include "fsdp/gradients.h"

#include <algorithm>
#include <set>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "comm/execution/diverged.h"
#include "comm/group/divergence_scope.h"
#include "memory/heap.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

std::vector<size_t> flats_of_parameters(const ShardedModel& model) {
  std::vector<size_t> flats;
  for (const auto& place : model.places) flats.push_back(place.flat->index);
  return flats;
}

/// A short text that identifies the parameters with gradients, so that a difference between ranks
/// is detected.
std::string digest(const std::vector<char>& used) {
  uint64_t hash = 1469598103934665603ull;
  for (const char bit : used) hash = (hash ^ static_cast<uint64_t>(bit)) * 1099511628211ull;
  return fmt::format("{} of {} parameters used, set {:04x}",
                     std::count(used.begin(), used.end(), 1), used.size(), hash & 0xffff);
}

/// True if a unit was reduced since the last call.
bool take_reduced(const ShardedModel& model) {
  bool any = false;
  for (auto* flat : model.flats) any = std::exchange(flat->gradients.reduced, false) || any;
  return any;
}

/// A rank that has ended its backward does not see that another one reduces a unit again, except
/// where a barrier follows. So only expected gradients may arrive after the reduction.
bool none_may_follow(const ShardedModel& model, const FlatParameter& flat,
                     const sharding::ArrivalTracker& tracker) {
  return model.shares_memory() ||
         std::all_of(flat.members.begin(), flat.members.end(),
                     [&](size_t parameter) { return tracker.expected(parameter) > 0; });
}

/// Another rank may reduce units that this rank has not reduced. If they were gathered before, no
/// gather shows it. Where the shards are in common memory, a barrier follows anyway. Replicas meet
/// when their shard groups have met: otherwise ranks may wait for each other in a circle.
void meet_others(ShardedModel& model, const std::vector<FlatParameter*>& reduced) {
  const std::set<const FlatParameter*> known(reduced.begin(), reduced.end());
  if (std::all_of(model.flats.begin(), model.flats.end(),
                  [&](const auto* flat) { return !flat->trainable || known.count(flat) > 0; }))
    return;
  const char* const tag = "end of backward without gradients of some units";
  if (model.replicas.size() > 1 || !model.shares_memory()) model.shard_group.barrier(tag);
  model.replicas.barrier(tag);
}

/// The same under no_sync(), where another rank may take memory for the gradients of other units.
void meet_others_without_sync(ShardedModel& model) {
  const auto& flats = model.flats;
  const bool alike = std::all_of(flats.begin(), flats.end(), [](const auto* flat) {
    return !flat->trainable || flat->gradients.flat.defined();
  });
  if (model.shares_memory() || (alike && !model.has_diverged)) return;
  model.shard_group.barrier("end of backward under no_sync()");
}

}  // namespace

Gradients::Gradients(ShardedModel& model, const FullyShardedDataParallelOptions& options,
                     FsdpStats& stats, JoinLeader& join_leader, Residency& residency)
    : model_(model),
      join_leader_(join_leader),
      residency_(residency),
      buffers_(model, stats),
      reductions_(model, options, stats, join_leader,
                  [this] {
                    residency_.diverge();
                    reduce_rest();
                    residency_.end_backward(true);
                  }),
      placeholders_(model, buffers_, reductions_),
      has_large_(has_large(model)),
      tracker_(flats_of_parameters(model), model.flats.size()) {}

void Gradients::begin_forward(bool trains) {
  const std::lock_guard lock(*model_.mutex);
  reductions_.finish_late();
  placeholders_.refuse_set();
  if (!trains) return;
  forwards_ += sync();
  if (has_large_) return_cleared(model_);
}

void Gradients::begin_backward() {
  const std::lock_guard lock(*model_.mutex);
  reductions_.finish_late();
  placeholders_.begin_backward();
  buffers_.begin_backward();
}

void Gradients::notice_cleared() {
  const std::lock_guard lock(*model_.mutex);
  placeholders_.notice();
}

void Gradients::wait() {
  const std::lock_guard lock(*model_.mutex);
  reductions_.finish_late();
}

/// Runs a part of backward that the ranks may run at different places, or not at all: once more
/// after a divergence.
template <class Action>
void Gradients::evenly(Action&& action) {
  try {
    const comm::DivergenceScope scope(may_diverge(model_, join_leader_));
    return action();
  } catch (const comm::Diverged&) {
    residency_.diverge();
  }
  action();
}

/// Gives `flat` a buffer, unless it has one.
void Gradients::begin(FlatParameter& flat) {
  if (flat.gradients.flat.defined()) return;
  drop_early();
  join_leader_.broadcast_event(FirstGradient{sync(), flat.index});
  if (sync()) {
    evenly([this] { reductions_.make_room(); });
    if (flat.gradients.defer_until_complete) residency_.gradients_complete(model_.units[flat.unit]);
  }
  if (has_large_) {
    const auto left = unreduced(model_);
    if (sync() && left.few()) {
      evenly([this] { reductions_.finish_all(); });
      return_free_slots(model_);
    }
    // Each call costs page faults in the next unit, so there are few.
    if (is_large(flat) || (left.small & (left.small - 1)) == 0) memory::return_freed_memory();
  }
  evenly([&] { buffers_.begin(flat); });
}

/// Gradients can be computed in the flat buffer only if the unit has one. So the unit that was
/// reduced after `flat` in the last backward gets its buffer now, not with its first gradient. All
/// ranks make this step at the same place in the order of their reductions.
void Gradients::begin_next(const FlatParameter& flat) {
  if (join_leader_.some_rank_has_no_data()) return;  // they take buffers when told to
  auto next = std::find(last_order_.begin(), last_order_.end(), &flat);
  if (next == last_order_.end() || ++next == last_order_.end()) return;
  auto& gradients = (*next)->gradients;
  // The buffers of gathered parameters are not free until the last use.
  if (gradients.flat.defined() || gradients.reduced || gradients.slots == (*next)->compute.slots ||
      !buffers_.has_windows(**next))
    return;
  begin(**next);
  gradients.early = true;
  early_ = *next;
}

void Gradients::arrived(size_t parameter, const at::Tensor& computed) {
  const std::lock_guard lock(*model_.mutex);
  at::NoGradGuard no_grad;
  const auto& [flat, member] = model_.places[parameter];
  auto& grad = flat->parameters[member].mutable_grad();
  if (!grad.defined()) return;
  const auto& name = model_.parameters[parameter].name;
  grad = sharding::dense_gradient(kName, name, grad, model_.world.rank());
  if (grad.requires_grad())
    throw UsageError(fmt::format(
        "{}: rank {}: this backward has create_graph, and .grad of the shard of parameter {} has "
        "no graph; expected torch::autograd::grad(…, create_graph) over the module's parameters or "
        "inputs, DistributedDataParallel or ZeroRedundancyOptimizer",
        kName, model_.world.rank(), name));
  tracker_.arrive(parameter);
  const bool complete = tracker_.complete(flat->index) && none_may_follow(model_, *flat, tracker_);
  const bool deferred = flat->gradients.defer_until_complete;
  if (sync() && deferred && !flat->gradients.flat.defined() && !complete) return;
  if (deferred) take_all(*flat, member, computed);
  else take(*flat, member, computed);
  if (!complete) return;
  if (sync())
    evenly([this, flat = flat] {
      if (!model_.diverged) reduce(*flat);
    });
  if (!model_.diverged) begin_next(*flat);
}

void Gradients::take(FlatParameter& flat, size_t member, const at::Tensor& computed) {
  if (!flat.parameters[member].grad().defined()) return;
  begin(flat);
  buffers_.take(flat, member, computed);
}

/// `computed`: of the member that has just arrived.
void Gradients::take_all(FlatParameter& flat, size_t arrived, const at::Tensor& computed) {
  for (size_t m = 0; m < flat.members.size(); ++m)
    take(flat, m, m == arrived ? computed : at::Tensor());
}

void Gradients::reduce(FlatParameter& flat) {
  auto& gradients = flat.gradients;
  auto& unit = model_.units[flat.unit];
  if (join_leader_.must_broadcast())
    join_leader_.broadcast_event(GradientsReduced{flat.index, forwards_, gradients.has});
  reductions_.finish(flat);
  buffers_.displace(flat);
  // Error feedback keeps a part of each value for the next reduction.
  for (size_t m = 0; m < gradients.has.size(); ++m)
    if (!gradients.has[m]) gradients.views[m].zero_();
  // Ranks that have made different numbers of passes would reduce gradients of different steps.
  const auto turn = model_.diverged ? 0 : order_.size(),
             backward = model_.diverged ? 0 : backwards_;
  reductions_.begin(
      flat, turn,
      fmt::format("gradients of unit {}: {}; backward {} after {} forwards", unit.display_name(),
                  digest(gradients.has), backward + 1, forwards_));
  order_.push_back(&flat);
  for (size_t m = 0; m < flat.members.size(); ++m) {
    const auto parameter = flat.members[m];
    tracker_.expect(parameter, gradients.has[m] || tracker_.arrivals(parameter) > 0);
  }
  buffers_.forget(flat);
  gradients.reduced = true;
  reductions_.begun();
  const auto left = unreduced(model_);
  if (left.small == 0 && left.large > 0) memory::return_freed_memory();
  residency_.gradients_done(unit);
}

void Gradients::shadow_gradient(size_t flat) {
  const std::lock_guard lock(*model_.mutex);
  begin(*model_.flats[flat]);
}

void Gradients::shadow_reduce(const GradientsReduced& event) {
  const std::lock_guard lock(*model_.mutex);
  auto& gradients = model_.flats[event.flat]->gradients;
  forwards_ = event.forwards;
  for (size_t m = 0; m < gradients.has.size(); ++m) {
    if (!gradients.has[m]) gradients.views[m].zero_();
    gradients.has[m] = event.used.at(m);
  }
  reduce(*model_.flats[event.flat]);
}

bool Gradients::end_backward() {
  const std::lock_guard lock(*model_.mutex);
  // The next backward starts without arrivals, even after an error in this one.
  const auto end = c10::make_scope_exit([this] { tracker_.begin(); });
  const at::NoGradGuard no_grad;
  buffers_.end_backward(true);
  bool reduced = take_reduced(model_);
  drop_early();
  if (sync()) {
    evenly([this] {
      for (auto* flat : model_.flats) {
        if (!flat->trainable) continue;
        if (flat->gradients.defer_until_complete) take_all(*flat, 0, {});
        if (flat->gradients.flat.defined() && !model_.diverged) reduce(*flat);
      }
      if (!model_.diverged) reductions_.finish_early();
      if (may_diverge(model_, join_leader_) && !order_.empty()) meet_others(model_, order_);
    });
    if (model_.diverged) reduce_in_order();
    reduced = take_reduced(model_) || reduced;
    if (reduced) ++backwards_;
    if (reduced) last_order_ = order_;
  } else if (!tracker_.order().empty()) {
    evenly([this] {
      if (may_diverge(model_, join_leader_)) meet_others_without_sync(model_);
    });
  }
  reductions_.end_backward();
  order_.clear();
  placeholders_.end_backward();
  return reduced;
}

bool Gradients::end_diverged_backward() { return sync() && reduce_rest(); }

bool Gradients::reduce_rest() {
  const std::lock_guard lock(*model_.mutex);
  const at::NoGradGuard no_grad;
  const auto own = placeholders_.own_access();
  reduce_in_order();
  const bool reduced = take_reduced(model_);
  reductions_.end_backward();
  order_.clear();
  placeholders_.end_backward();
  return reduced;
}

/// Reduces all gradients that are left. Parameters without a gradient on this rank count as zero if
/// another rank has one.
void Gradients::reduce_in_order() {
  reductions_.finish_all();
  ShardedModel::meet(model_.replicas);
  reductions_.take_back([this](auto& flat, const auto& slot, const auto& used) {
    buffers_.take_back(flat, slot, used);
  });
  std::vector<int> ranks_with;
  for (auto* flat : model_.flats) {
    ranks_with.insert(ranks_with.end(), flat->gradients.has.begin(), flat->gradients.has.end());
  }
  auto counts = at::tensor(ranks_with, at::kInt).to(model_.world.control_device());
  model_.world.all_reduce_async(counts, 1, "which parameters have gradients").wait();
  counts = counts.cpu();
  const auto count = counts.accessor<int, 1>();
  int64_t next = 0;
  for (auto* flat : model_.flats) {
    auto& gradients = flat->gradients;
    const auto begins = next, members = static_cast<int64_t>(gradients.has.size());
    next += members;
    if (counts.narrow(0, begins, members).sum().item<int64_t>() == 0) continue;
    begin(*flat);
    for (size_t m = 0; m < gradients.has.size(); ++m) {
      const bool used = count[begins + static_cast<int64_t>(m)] > 0;
      if (used && !std::exchange(gradients.has[m], 1)) gradients.views[m].zero_();
    }
    reduce(*flat);
  }
}

void Gradients::abandon() {
  const std::lock_guard lock(*model_.mutex);
  buffers_.end_backward(false);
  order_.clear();
  for (auto* flat : model_.flats) {
    for (const auto& parameter : flat->parameters) parameter.mutable_grad() = at::Tensor();
    buffers_.drop(*flat);
    flat->gradients.reduced = false;
  }
  reductions_.drop();
  tracker_.begin();
  placeholders_.end_backward();
}

void Gradients::zero_grad(bool set_to_none) {
  const std::lock_guard lock(*model_.mutex);
  at::NoGradGuard no_grad;
  placeholders_.notice();
  const auto own = placeholders_.own_access();
  if (set_to_none) placeholders_.take_away();
  for (auto* flat : model_.flats) {
    buffers_.drop(*flat);
    for (auto& shard : flat->shards) {
      auto& grad = shard.tensor.mutable_grad();
      if (!grad.defined()) continue;
      if (set_to_none) grad = at::Tensor();
      else grad.zero_();
    }
  }
}

/// The unit that got its buffer early has no gradient: this backward is not like the last one.
void Gradients::drop_early() {
  if (early_ && early_->gradients.early) buffers_.drop(*early_);
  early_ = nullptr;
}

}  // namespace tessera::fsdp
