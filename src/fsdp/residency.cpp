#include "fsdp/residency.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <tuple>

#include <fmt/format.h>

#include "comm/execution/diverged.h"
#include "comm/group/divergence_scope.h"
#include "fsdp/paging/advice.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

constexpr size_t kMaxGathering = 2;

/// Gathers between hosts take as long as the wire needs.
size_t units_ahead(const ProcessGroup& shard_group) {
  return shard_group.size() > 1 && !shard_group.same_host() ? kMaxGathering : 1;
}

int64_t budget(const ShardedModel& model, const FullyShardedDataParallelOptions& options,
               size_t look_ahead) {
  if (options.sharding_strategy == ShardingStrategy::shard_grad_op)
    return std::numeric_limits<int64_t>::max();
  if (options.resident_bytes > 0) return options.resident_bytes;
  std::vector<int64_t> bytes;
  for (const auto& unit : model.units)
    if (!unit.root) bytes.push_back(unit.gathered_bytes());
  std::sort(bytes.rbegin(), bytes.rend());
  bytes.resize(1 + look_ahead);
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

[[noreturn]] void refuse(const ShardedModel& model, const std::string& text) {
  throw UsageError(fmt::format("{}: rank {}: {}", kName, model.world.rank(), text));
}

/// "parameter layers.0.weight (unit layers.0)"
std::string describe(const ShardedModel& model, const sharding::PageUse& use) {
  const auto& flat = *model.flats[use.page->index()];
  const auto unit = model.units[flat.unit].display_name();
  for (size_t m = flat.members.size(); m-- > 0;)
    if (flat.layout.offset(m) <= use.offset)
      return fmt::format("parameter {} (unit {})", model.parameters[flat.members[m]].name, unit);
  return "unit " + unit;
}

[[noreturn]] void refuse_outside(const ShardedModel& model, const sharding::PageUse& use,
                                 std::string_view op) {
  refuse(model, fmt::format("{} uses {}, which is sharded and whole only while the model runs; "
                            "expected a use inside the forward of the wrapped model or its "
                            "backward, or inside summon_full_params(); an optimizer takes "
                            "fsdp.parameters()",
                            op, describe(model, use)));
}

void refuse_misuse(const ShardedModel& model, const sharding::PageUse& use, std::string_view op) {
  if (use.written)
    refuse(model, fmt::format("{} writes to {}, which is only a gathered copy here, so the change "
                              "would be lost; expected writes inside summon_full_params(), or to "
                              "fsdp.parameters()",
                              op, describe(model, use)));
  if (use.page != model.flats[use.page->index()]->compute.page.get())
    refuse(model,
           fmt::format("{} uses {} of a forward in {}, but the model has since run in "
                       "another precision (option full_precision_in_eval); expected "
                       "backward before forward changes between training and evaluation "
                       "mode",
                       op, describe(model, use), c10::toString(use.page->flat().scalar_type())));
}

/// A backward begins: the graph must not be older than the values of the shards.
void refuse_stale_graph(const ShardedModel& model) {
  for (const auto& unit : model.units) {
    if (!unit.is_stale()) continue;
    refuse(model,
           fmt::format("backward needs the values of parameters that have been modified since the "
                       "forward (unit \"{}\", for example {}), by an optimizer's step or another "
                       "inplace operation on the shards; expected backward before step()",
                       unit.name, model.parameters[unit.flats[0].members[0]].name));
  }
}

bool contains(const std::vector<size_t>& units, size_t unit) {
  return std::find(units.begin(), units.end(), unit) != units.end();
}

/// True if the module of `outer` contains that of one of `units`, and so is likely to continue
/// after it.
bool encloses_one(const ShardedModel& model, const std::vector<size_t>& units, size_t outer) {
  for (auto inner : units) {
    while (!model.units[inner].root) {
      inner = model.units[inner].parent;
      if (inner == outer) return true;
    }
  }
  return false;
}

}  // namespace

Residency::Residency(ShardedModel& model, const FullyShardedDataParallelOptions& options,
                     FsdpStats& stats, JoinLeader& join_leader)
    : model_(model),
      options_(options),
      stats_(stats),
      join_leader_(join_leader),
      order_(model.units.size()),
      stream_(model.device()),
      look_ahead_(units_ahead(model.shard_group)) {}

void Residency::need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) {
  // in_backward() costs more than the rest of this function, so it is called only if no backward is
  // known to run.
  const bool backward = (backward_ && forwards_ == 0) || sharding::BackwardWatch::in_backward();
  if (!backward && forwards_ == 0) refuse_outside(model_, uses[0], op);
  for (const auto& use : uses) refuse_misuse(model_, use, op);
  if (backward && !backward_) {
    refuse_stale_graph(model_);
    model_.watch->begin();  // not under the mutex, which it takes
    backward_ = true;
  }
  const std::lock_guard lock(*model_.mutex);
  needed_.clear();
  for (const auto& use : uses) {
    const auto unit = model_.flats[use.page->index()]->unit;
    if (!contains(needed_, unit)) needed_.push_back(unit);
  }
  advised([&] { this->use(backward ? Phase::backward : Phase::forward); });
}

void Residency::failed(const sharding::PageUse& use, std::string_view op,
                       const c10::Error& error) const {
  advise_on_dtypes(error, options_.mixed_precision,
                   fmt::format("{}: rank {}: {} with {}", kName, model_.world.rank(), op,
                               describe(model_, use)));
}

/// The current operator uses the units in needed_.
void Residency::use(Phase phase) {
  if (model_.diverged) return;
  try {
    const comm::DivergenceScope scope(may_diverge(model_, join_leader_));
    gather_needed(phase);
  } catch (const comm::Diverged&) {
    diverge();
  }
}

void Residency::diverge() {
  const std::lock_guard lock(*model_.mutex);
  model_.diverge();
  turn_ = 0;
  for (auto& unit : model_.units) {
    const bool counted = unit.state != Unit::State::released;
    unit.settle(stream_);
    if (counted && unit.state == Unit::State::released)
      stats_.gathered_bytes -= unit.gathered_bytes();
  }
  for (auto& unit : model_.units) {
    if (unit.state == Unit::State::released) fetch(unit, phase_, false);
    else unit.gather(model_.shard_group.rank(), model_.gathers, turn_, stream_, true);
  }
  for (auto& unit : model_.units) unit.finish(stream_);
}

void Residency::gather_needed(Phase phase) {
  const bool backward = phase == Phase::backward, between_hosts = look_ahead_ > 1;
  if (std::exchange(phase_, phase) != phase) turn_ = 0;
  bool moved = false, all_resident = true;
  for (const auto u : needed_) {
    moved |= order_.touch(u, phase);
    all_resident &= model_.units[u].state == Unit::State::resident;
    model_.units[u].last_use = ++clock_;
    model_.units[u].in_forward = true;
  }
  if (!moved && all_resident) return;
  if (join_leader_.must_broadcast() && (backward || followed_))
    join_leader_.broadcast_event(UnitsUsed{phase, needed_});
  for (const auto u : needed_) {
    auto& unit = model_.units[u];
    if (unit.state != Unit::State::released) continue;
    if (!unit.root) release_until_it_fits(unit.gathered_bytes(), 0);
    fetch(unit, phase, false);
  }
  // In shared memory a gather in forward does not wait for data, and ranks that use other units
  // detect it there.
  const bool prefetches = moved && options_.overlap != Overlap::none &&
                          (backward ? options_.backward_prefetch == BackwardPrefetch::pre
                                    : between_hosts || !model_.device().is_cpu());
  // The wire does not pause between two gathers if the second begins before the first is over.
  if (prefetches && between_hosts) prefetch_next(phase);
  for (const auto u : needed_) model_.units[u].finish(stream_);
  if (prefetches && !between_hosts) prefetch_next(phase);
}

void Residency::fetch(Unit& unit, Phase phase, bool prefetch) {
  unit.gather(model_.shard_group.rank(), model_.gathers, turn_, stream_, model_.diverged);
  if (unit.on_host()) copies_.issued(unit.mark);
  ++(phase == Phase::forward ? stats_.gathers_forward : stats_.gathers_backward);
  stats_.prefetches += prefetch;
  stats_.gathered_bytes += unit.gathered_bytes();
  stats_.peak_gathered_bytes = std::max(stats_.peak_gathered_bytes, stats_.gathered_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.gathered_bytes + stats_.gradient_bytes);
}

void Residency::release(Unit& unit) {
  if (unit.state == Unit::State::released || model_.diverged) return;
  unit.release(stream_);
  stats_.gathered_bytes -= unit.gathered_bytes();
}

/// Releases units until `bytes` more fit into the budget; only units whose next use is at least
/// `min_distance` uses away. Returns whether they fit.
bool Residency::release_until_it_fits(int64_t bytes, size_t min_distance) {
  const auto limit = budget(model_, options_, look_ahead_);
  while (true) {
    int64_t gathered = 0;  // except the root
    // The unit with the farthest next use. Among equals, e.g. without a record, preferably one that
    // contains no needed unit, and then the least recently used.
    using Lateness = std::tuple<size_t, bool, uint64_t>;
    Unit* victim = nullptr;
    Lateness latest;
    for (auto& unit : model_.units) {
      if (unit.state == Unit::State::released || unit.root) continue;
      gathered += unit.gathered_bytes();
      if (contains(needed_, model_.index_of(unit))) continue;
      const Lateness lateness{order_.next_use(model_.index_of(unit)),
                              !encloses_one(model_, needed_, model_.index_of(unit)),
                              clock_ - unit.last_use};
      if (std::get<0>(lateness) < min_distance || (victim && lateness <= latest)) continue;
      victim = &unit;
      latest = lateness;
    }
    if (gathered + bytes <= limit) return true;
    if (!victim) return false;
    release(*victim);
  }
}

void Residency::prefetch_next(Phase phase) {
  for (size_t distance = 0; distance < look_ahead_; ++distance) {
    const auto next = order_.next(distance);
    if (!next || !prefetch(model_.units[*next], phase, distance + 1)) return;
  }
}

/// Gathers a unit that is used after `distance` - 1 other uses. Returns whether units that are used
/// later may be gathered too.
bool Residency::prefetch(Unit& unit, Phase phase, size_t distance) {
  if (unit.state != Unit::State::released || unit.gathered_bytes() == 0) return true;
  const auto gathering =
      std::count_if(model_.units.begin(), model_.units.end(), [this](const Unit& other) {
        return other.state == Unit::State::gathering && !contains(needed_, model_.index_of(other));
      });
  if (gathering >= static_cast<int64_t>(kMaxGathering)) return false;
  if (!unit.root && !release_until_it_fits(unit.gathered_bytes(), distance)) return false;
  fetch(unit, phase, true);
  return true;
}

void Residency::gradients_complete(Unit& unit) {
  if (order_.next_use(model_.index_of(unit)) == UseOrder::kNever) release(unit);
}

void Residency::gradients_done(Unit& unit) {
  unit.changed = unit.reduced = true;
  if (unit.state == Unit::State::resident && !unit.root && order_.follows_record() &&
      order_.next_use(model_.index_of(unit)) == UseOrder::kNever)
    release(unit);
  needed_.clear();
  const bool prefetches = options_.overlap != Overlap::none && !model_.diverged;
  if (prefetches && options_.backward_prefetch == BackwardPrefetch::post)
    prefetch_next(Phase::backward);
}

void Residency::begin_forward(bool full_precision) {
  const std::lock_guard lock(*model_.mutex);
  if (forwards_ == 0) {
    phase_ = Phase::forward;
    followed_ = at::GradMode::is_enabled();
    if (followed_) join_leader_.broadcast_event(ForwardBegins{full_precision});
    synchronize_changes();
    turn_ = 0;
    for (auto& unit : model_.units) {
      unit.note_versions();
      unit.in_forward = false;
    }
  }
  ++forwards_;
}

void Residency::shadow_use(const UnitsUsed& event) {
  const std::lock_guard lock(*model_.mutex);
  needed_ = event.units;
  use(event.phase);
}

void Residency::end_forward(bool step_over) {
  const std::lock_guard lock(*model_.mutex);
  if (--forwards_ > 0) return;
  const bool meets =
      units_may_differ(model_, join_leader_) && may_follow(model_, step_over, turn_ > 0);
  if (step_over) {
    end_step();
    copies_.wait();
  }
  if (followed_) join_leader_.broadcast_event(ForwardEnds{});
  try {
    wait_for_readers("end of forward", meets);
  } catch (const comm::Diverged&) {
    diverge();
    wait_for_readers("end of forward", may_follow(model_, step_over, turn_ > 0));
    if (step_over) end_step();
  }
}

void Residency::abandon_forward(bool step_over) {
  const std::lock_guard lock(*model_.mutex);
  if (--forwards_ == 0 && step_over) end_step();
}

void Residency::end_backward(bool reduced) {
  const std::lock_guard lock(*model_.mutex);
  end_step();
  if (reduced) copies_.wait();
  wait_for_readers("end of backward");
}

void Residency::end_step() {
  order_.end_step();
  needed_.clear();
  const bool diverged = std::exchange(model_.diverged, false);
  const bool keeps_unchanged =
      options_.sharding_strategy == ShardingStrategy::shard_grad_op || options_.resident_bytes > 0;
  for (auto& unit : model_.units)
    if (!keeps_unchanged || unit.changed || diverged) release(unit);
  if (!diverged) return;
  order_ = UseOrder(model_.units.size());
  phase_ = Phase::forward;
  turn_ = 0;
  for (auto& unit : model_.units) unit.last_use = 0;
  for (auto* flat : model_.flats)
    for (auto* slots : {flat->compute.slots, flat->gradients.slots})
      if (slots) slots->sort_free();
}

/// See [Note: shards in common memory].
void Residency::wait_for_readers(const char* tag, bool meets) {
  const comm::DivergenceScope scope(may_diverge(model_, join_leader_));
  if (model_.shares_memory() || meets) advised([&] { model_.shard_group.barrier(tag); });
}

void Residency::release_all() {
  const std::lock_guard lock(*model_.mutex);
  model_.diverged = false;
  for (auto& unit : model_.units) release(unit);
  copies_.wait();
}

/// Releases on all ranks of the shard group every unit that is still gathered and whose shards have
/// changed on any of them.
void Residency::synchronize_changes() {
  if (model_.diverged) end_step();
  bool any_gathered = false;
  std::vector<int> changed;
  for (auto& unit : model_.units) {
    unit.reduced = unit.reduced && unit.has_gradients();
    const bool gathered = unit.state != Unit::State::released;
    any_gathered |= gathered;
    changed.push_back(gathered && (unit.changed || unit.versions() != unit.gathered_versions));
  }
  if (!any_gathered) return;
  if (model_.shard_group.size() > 1) {
    auto flags = at::tensor(changed, at::kInt).to(model_.shard_group.control_device());
    try {
      const comm::DivergenceScope scope(may_diverge(model_, join_leader_));
      model_.shard_group.all_reduce_async(flags, 1, "which gathered units have changed").wait();
    } catch (const comm::Diverged&) {  // other ranks are still in a backward under no_sync()
      diverge();
      return end_step();
    }
    flags = flags.cpu();
    changed.assign(flags.data_ptr<int>(), flags.data_ptr<int>() + flags.numel());
  }
  for (size_t u = 0; u < model_.units.size(); ++u)
    if (changed[u]) release(model_.units[u]);
}

}  // namespace tessera::fsdp
