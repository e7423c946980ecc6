#include "fsdp/residency.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "fsdp/paging/advice.h"
#include "sharding/gradients/backward_watch.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

constexpr size_t kMaxGathering = 2;

}  // namespace

Residency::Residency(ShardedModel& model, const FullyShardedDataParallelOptions& options,
                     FsdpStats& stats, JoinLeader& join_leader, std::function<void()> in_backward)
    : model_(model),
      options_(options),
      stats_(stats),
      join_leader_(join_leader),
      in_backward_(std::move(in_backward)),
      gathered_(model.units.size()),
      order_(model.units.size()),
      stream_(model.flats.empty() ? at::Device(at::kCPU) : model.flats[0].device),
      changed_(model.units.size()) {
  unlimited_ = options.sharding_strategy == ShardingStrategy::shard_grad_op;
  keeps_unchanged_ = unlimited_ || options.resident_bytes > 0;
  for (const auto& flat : model.flats) shares_memory_ |= flat.common.defined();
  crosses_hosts_ = model.shard_group.size() > 1 && !model.shard_group.same_host();
  if (crosses_hosts_) look_ahead_ = kMaxGathering;
}

int64_t Residency::budget() const {
  if (unlimited_) return std::numeric_limits<int64_t>::max();
  if (options_.resident_bytes > 0) return options_.resident_bytes;
  std::vector<int64_t> bytes;
  for (const auto& unit : model_.units) {
    if (!unit.root) bytes.push_back(unit.gathered_bytes);
  }
  std::sort(bytes.rbegin(), bytes.rend());
  bytes.resize(1 + look_ahead_);
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

std::string Residency::describe(const sharding::PageUse& use) const {
  const auto& flat = model_.flats[use.page->index()];
  for (size_t m = flat.members.size(); m-- > 0;) {
    if (flat.layout.offset(m) <= use.offset) {
      return fmt::format("parameter {} (unit {})", model_.parameters[flat.members[m]].name,
                         display_name(model_.units[flat.unit]));
    }
  }
  return fmt::format("unit {}", display_name(model_.units[flat.unit]));
}

void Residency::refuse_outside(const sharding::PageUse& use, std::string_view op) const {
  throw UsageError(
      fmt::format("FullyShardedDataParallel: rank {}: {} uses {}, which is sharded and whole only "
                  "while the model runs; expected a use inside the forward of the wrapped model or "
                  "its backward, or inside summon_full_params(); an optimizer takes "
                  "fsdp.parameters()",
                  model_.world.rank(), op, describe(use)));
}

void Residency::refuse_write(const sharding::PageUse& use, std::string_view op) const {
  throw UsageError(fmt::format(
      "FullyShardedDataParallel: rank {}: {} writes to {}, which is only a gathered copy "
      "here, so the change would be lost; expected writes inside "
      "summon_full_params(), or to fsdp.parameters()",
      model_.world.rank(), op, describe(use)));
}

void Residency::refuse_idle(const sharding::PageUse& use, std::string_view op) const {
  throw UsageError(fmt::format(
      "FullyShardedDataParallel: rank {}: {} uses {} of a forward in {}, but the model has since "
      "run in another precision (option full_precision_in_eval); "
      "expected backward before forward changes between training and evaluation mode",
      model_.world.rank(), op, describe(use), c10::toString(use.page->flat().scalar_type())));
}

void Residency::need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) {
  std::unique_lock lock(mutex_);
  // in_backward() costs more than the rest of this function, so it is called only if no backward is
  // known to run.
  const bool backward = (backward_ && forwards_ == 0) || sharding::BackwardWatch::in_backward();
  if (!backward && forwards_ == 0) refuse_outside(uses[0], op);
  const auto phase = backward ? Phase::backward : Phase::forward;
  const auto find_units = [&] {
    needed_.clear();
    for (const auto& use : uses) {
      const auto& flat = model_.flats[use.page->index()];
      if (use.written) refuse_write(use, op);
      if (use.page != flat.compute.page.get()) refuse_idle(use, op);
      if (needed_.empty() || std::find(needed_.begin(), needed_.end(), flat.unit) == needed_.end())
        needed_.push_back(flat.unit);
    }
  };
  find_units();
  if (backward && !backward_) refuse_stale_graph();
  if (backward && !backward_) {
    // It takes the lock of Gradients, which calls gradients_complete() under that lock.
    lock.unlock();
    in_backward_();
    lock.lock();
    backward_ = true;
    find_units();
  }
  advised([&] { use(phase); });
}

void Residency::failed(const sharding::PageUse& use, std::string_view op,
                       const c10::Error& error) const {
  advise_on_dtypes(
      error, options_.mixed_precision,
      fmt::format("{}: rank {}: {} with {}", kName, model_.world.rank(), op, describe(use)));
}

void Residency::begin_phase(Phase phase) {
  phase_ = phase;
  turn_ = 0;
}

/// The current operator uses the units in needed_.
void Residency::use(Phase phase) {
  const bool backward = phase == Phase::backward;
  if (phase != phase_) begin_phase(phase);
  bool moved = false, all_resident = true;
  for (const auto unit : needed_) {
    auto& gathered = gathered_[unit];
    moved |= order_.touch(unit, phase);
    all_resident &= gathered.state == State::resident;
    gathered.last_use = ++clock_;
  }
  if (!moved && all_resident) return;
  if (join_leader_.must_broadcast() && (backward || followed_))
    join_leader_.broadcast_event(UnitsUsed{phase, needed_});
  if (!all_resident) {
    for (const auto unit : needed_) {
      if (gathered_[unit].state != State::released) continue;
      if (!model_.units[unit].root)
        release_until_it_fits(model_.units[unit].gathered_bytes, needed_, 0);
      fetch(unit, phase, false);
    }
  }
  const bool prefetches = moved && options_.overlap != Overlap::none &&
                          (!backward || options_.backward_prefetch == BackwardPrefetch::pre);
  // The wire does not pause between two gathers if the second begins before the first is over.
  if (prefetches && crosses_hosts_) prefetch_next(phase);
  for (const auto unit : needed_) finish(unit);
  if (prefetches && !crosses_hosts_) prefetch_next(phase);
}

void Residency::fetch(size_t index, Phase phase, bool prefetch) {
  at::NoGradGuard no_grad;
  auto& unit = model_.units[index];
  auto& gathered = gathered_[index];
  const auto tag = "gather of unit " + display_name(unit);
  {
    const comm::CommStream::Scope on_comm_stream(stream_);
    for (const auto f : unit.flats) {
      auto& flat = model_.flats[f];
      if (flat.permanent) continue;
      auto memory = flat.common;
      if (!memory.defined()) {
        memory = flat.compute.slots->take(flat.layout.numel());
        const int rank = model_.shard_group.rank();
        auto shard = flat.own_segment;
        // libtorch converts on the host, into memory for whose copy the host waits.
        if (shard.device() != memory.device() && shard.scalar_type() != memory.scalar_type())
          shard = shard.to(memory.device(), /*non_blocking=*/true);
        memory.narrow(0, flat.layout.segment_begin(rank), flat.layout.counts()[rank])
            .copy_(shard, true);
      }
      gathered.memory.push_back(memory);
      auto group = model_.gathers.group(turn_++);
      gathered.work.push_back(
          group.size() > 1 ? group.all_gather_async(memory, flat.layout.counts(), tag) : Work());
    }
    gathered.mark = stream_.mark();
  }
  for (const auto f : unit.flats) {
    if (model_.flats[f].own_segment.device() != model_.flats[f].device) copied_ = gathered.mark;
  }
  gathered.state = State::gathering;
  gathered.changed = gathered.reduced;  // the values are of before the optimizer's step
  gathered.versions = versions(index);
  ++(phase == Phase::forward ? stats_.gathers_forward : stats_.gathers_backward);
  stats_.prefetches += prefetch;
  if (!unit.root) resident_bytes_ += unit.gathered_bytes;
  stats_.gathered_bytes += unit.gathered_bytes;
  stats_.peak_gathered_bytes = std::max(stats_.peak_gathered_bytes, stats_.gathered_bytes);
  stats_.peak_bytes = std::max(stats_.peak_bytes, stats_.gathered_bytes + stats_.gradient_bytes);
}

void Residency::finish(size_t index) {
  auto& gathered = gathered_[index];
  if (gathered.state != State::gathering) return;
  for (auto& work : gathered.work) work.wait();
  stream_.join(gathered.mark);
  size_t i = 0;
  for (const auto f : model_.units[index].flats) {
    auto& flat = model_.flats[f];
    if (!flat.permanent) flat.compute.page->attach(gathered.memory[i++]);
  }
  gathered.work.clear();
  gathered.state = State::resident;
}

void Residency::release(size_t index) {
  auto& gathered = gathered_[index];
  if (gathered.state == State::released) return;
  finish(index);
  size_t i = 0;
  for (const auto f : model_.units[index].flats) {
    auto& flat = model_.flats[f];
    if (flat.permanent) continue;
    flat.compute.page->detach();
    if (flat.compute.slots) flat.compute.slots->give(gathered.memory[i]);
    ++i;
  }
  gathered.memory.clear();
  gathered.state = State::released;
  if (!model_.units[index].root) resident_bytes_ -= model_.units[index].gathered_bytes;
  stats_.gathered_bytes -= model_.units[index].gathered_bytes;
}

/// Whether the module of `unit` contains that of a needed unit, and so is likely to continue after
/// it.
bool Residency::contains_needed(size_t unit, const std::vector<size_t>& needed) const {
  for (auto inner : needed) {
    while (!model_.units[inner].root) {
      inner = model_.units[inner].parent;
      if (inner == unit) return true;
    }
  }
  return false;
}

/// Releases units until `bytes` more fit into the budget; only units whose next use is at least
/// `min_distance` uses away. Returns whether they fit.
bool Residency::release_until_it_fits(int64_t bytes, const std::vector<size_t>& needed,
                                      size_t min_distance) {
  while (resident_bytes_ + bytes > budget()) {
    // The unit with the farthest next use. Among equals, e.g. without a record, preferably one that
    // contains no needed unit, and then the least recently used.
    using Lateness = std::tuple<size_t, bool, uint64_t>;
    size_t victim = gathered_.size();
    Lateness latest;
    for (size_t u = 0; u < gathered_.size(); ++u) {
      if (gathered_[u].state == State::released || model_.units[u].root ||
          std::find(needed.begin(), needed.end(), u) != needed.end())
        continue;
      const Lateness lateness{order_.next_use(u), !contains_needed(u, needed),
                              clock_ - gathered_[u].last_use};
      if (std::get<0>(lateness) < min_distance ||
          (victim != gathered_.size() && lateness <= latest))
        continue;
      victim = u;
      latest = lateness;
    }
    if (victim == gathered_.size()) return false;
    release(victim);
  }
  return true;
}

void Residency::prefetch_next(Phase phase) {
  for (size_t distance = 0; distance < look_ahead_; ++distance) {
    const auto next = order_.next(distance);
    if (!next || !prefetch(*next, phase, distance + 1)) return;
  }
}

/// Gathers a unit that is used after `distance` - 1 other uses. Returns whether units that are used
/// later may be gathered too.
bool Residency::prefetch(size_t unit, Phase phase, size_t distance) {
  if (gathered_[unit].state != State::released || !model_.units[unit].is_gathered_on_use())
    return true;
  size_t gathering = 0;
  for (size_t u = 0; u < gathered_.size(); ++u) {
    gathering += gathered_[u].state == State::gathering &&
                 std::find(needed_.begin(), needed_.end(), u) == needed_.end();
  }
  if (gathering >= kMaxGathering) return false;
  if (!model_.units[unit].root &&
      !release_until_it_fits(model_.units[unit].gathered_bytes, needed_, distance))
    return false;
  fetch(unit, phase, true);
  return true;
}

void Residency::gradients_complete(size_t unit) {
  std::lock_guard lock(mutex_);
  if (order_.next_use(unit) == UseOrder::kNever) release(unit);
}

void Residency::gradients_done(size_t unit) {
  std::lock_guard lock(mutex_);
  gathered_[unit].changed = gathered_[unit].reduced = reduced_ = true;
  if (gathered_[unit].state == State::resident && !model_.units[unit].root &&
      order_.follows_record() && order_.next_use(unit) == UseOrder::kNever)
    release(unit);
  needed_.clear();
  if (options_.overlap != Overlap::none && options_.backward_prefetch == BackwardPrefetch::post)
    prefetch_next(Phase::backward);
}

void Residency::begin_forward(bool full_precision) {
  std::lock_guard lock(mutex_);
  if (forwards_ == 0) {
    begin_phase(Phase::forward);
    followed_ = at::GradMode::is_enabled();
    if (followed_) join_leader_.broadcast_event(ForwardBegins{full_precision});
    synchronize_changes();
    note_versions();
  }
  ++forwards_;
}

void Residency::shadow_begin_forward() {
  std::lock_guard lock(mutex_);
  begin_phase(Phase::forward);
  synchronize_changes();
}

void Residency::shadow_use(const UnitsUsed& event) {
  std::lock_guard lock(mutex_);
  needed_ = event.units;
  use(event.phase);
}

void Residency::end_forward(bool step_over) {
  std::lock_guard lock(mutex_);
  if (--forwards_ > 0) return;
  if (step_over) {
    end_step();
    wait_for_copies();
  }
  if (followed_) join_leader_.broadcast_event(ForwardEnds{});
  wait_for_readers("end of forward");
}

void Residency::abandon_forward(bool step_over) {
  std::lock_guard lock(mutex_);
  if (--forwards_ == 0 && step_over) end_step();
}

void Residency::shadow_end_forward() {
  std::lock_guard lock(mutex_);
  wait_for_readers("end of forward");
}

void Residency::end_backward() {
  std::lock_guard lock(mutex_);
  end_step();
  if (std::exchange(reduced_, false)) wait_for_copies();
  wait_for_readers("end of backward");
}

void Residency::end_step() {
  order_.end_step();
  needed_.clear();
  for (size_t u = 0; u < gathered_.size(); ++u) {
    if (!keeps_unchanged_ || gathered_[u].changed) release(u);
  }
}

void Residency::wait_for_readers(const char* tag) {
  if (shares_memory_) advised([&] { model_.shard_group.barrier(tag); });
}

/// See [Note: shards on the host].
void Residency::wait_for_copies() {
  const auto copied = std::exchange(copied_, nullptr);
  if (!copied || copied->query()) return;
  const comm::CommStream::Scope copies(stream_, copied);  // not for what was computed since
  stream_.wait_for_current();
}

void Residency::HostShards::need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) {
  const std::lock_guard lock(residency_.mutex_);
  residency_.wait_for_copies();
}

void Residency::release_all() {
  std::lock_guard lock(mutex_);
  for (size_t u = 0; u < gathered_.size(); ++u) release(u);
  wait_for_copies();
}

uint64_t Residency::versions(size_t unit) const {
  uint64_t sum = 0;
  for (const auto f : model_.units[unit].flats) {
    for (const auto& shard : model_.flats[f].shards)
      sum += shard.tensor.unsafeGetTensorImpl()->version_counter().current_version();
  }
  return sum;
}

/// A forward begins. If the shards have changed since the last one, the parameters' versions change
/// too: autograd then refuses a graph of an earlier forward that needs their values.
void Residency::note_versions() {
  forward_versions_.resize(model_.units.size(), 0);
  for (size_t u = 0; u < model_.units.size(); ++u) {
    const auto now = versions(u);
    if (std::exchange(forward_versions_[u], now) == now) continue;
    for (const auto f : model_.units[u].flats) {
      if (model_.flats[f].permanent) continue;  // parameter and shard have one version
      for (const auto i : model_.flats[f].members)
        model_.parameters[i].tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

/// A backward begins: the graph must not be older than the values of the shards.
void Residency::refuse_stale_graph() {
  const auto changed = [this](size_t u) {
    if (versions(u) != forward_versions_[u]) return true;
    for (const auto f : model_.units[u].flats) {
      for (size_t m = 0; m < model_.flats[f].shards.size(); ++m) {
        if (is_replaced(model_.flats[f], m)) return true;
      }
    }
    return false;
  };
  for (size_t u = 0; u < forward_versions_.size(); ++u) {
    if (!changed(u)) continue;
    const auto& first = model_.flats[model_.units[u].flats[0]];
    throw UsageError(fmt::format(
        "FullyShardedDataParallel: rank {}: backward needs the values of parameters that have been "
        "modified since the forward (unit \"{}\", for example {}), by an optimizer's step or "
        "another inplace operation on the shards; expected backward before step()",
        model_.world.rank(), model_.units[u].name, model_.parameters[first.members[0]].name));
  }
}

bool Residency::has_gradients(size_t unit) const {
  const auto& flats = model_.units[unit].flats;
  return std::any_of(flats.begin(), flats.end(), [this](size_t f) {
    const auto& shards = model_.flats[f].shards;
    return std::any_of(shards.begin(), shards.end(),
                       [](const auto& shard) { return shard.tensor.grad().defined(); });
  });
}

/// Releases on all ranks every unit that is still gathered and whose shards have changed on any
/// rank.
void Residency::synchronize_changes() {
  bool any_gathered = false;
  for (size_t u = 0; u < gathered_.size(); ++u) {
    gathered_[u].reduced = gathered_[u].reduced && has_gradients(u);
    const bool is_gathered = gathered_[u].state != State::released;
    any_gathered |= is_gathered;
    changed_[u] = is_gathered && (gathered_[u].changed || versions(u) != gathered_[u].versions);
  }
  if (!any_gathered) return;
  if (model_.world.size() > 1) {
    auto flags = at::tensor(changed_, at::kInt).to(model_.world.control_device());
    model_.world.all_reduce_async(flags, 1, "which gathered units have changed").wait();
    flags = flags.cpu();
    changed_.assign(flags.data_ptr<int>(), flags.data_ptr<int>() + flags.numel());
  }
  for (size_t u = 0; u < gathered_.size(); ++u) {
    if (changed_[u]) release(u);
  }
}

}  // namespace tessera::fsdp
