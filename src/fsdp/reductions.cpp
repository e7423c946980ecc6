#include "fsdp/reductions.h"

#include <algorithm>

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "comm/base/tree_sum.h"
#include "comm/execution/diverged.h"
#include "fsdp/gradient_buffers.h"
#include "fsdp/paging/advice.h"
#include "tessera/error.h"

namespace tessera::fsdp {

namespace {

// Reductions at the same time. Between hosts one may take longer than a unit's backward, which is
// not delayed for it.
constexpr size_t kMaxOpen = 2, kMaxOpenBetweenHosts = 3;

/// Values that travel alike use the groups of the gathers.
sharding::Lanes lanes_of(const ShardedModel& model, WireFormat wire, WireFormat of_gathers) {
  return wire == of_gathers ? model.gathers : sharding::Lanes(model.shard_group, wire, 1);
}

/// The hooks that the program has registered on a tensor (register_hook).
const auto& hooks_of(const at::Tensor& tensor) { return torch::autograd::impl::hooks(tensor); }

/// `recover`: after a divergence that `action` has shown.
template <class Action>
void recovering(const std::function<void()>& recover, Action&& action) {
  try {
    action();
  } catch (const comm::Diverged&) {
    recover();
  }
}

bool all_are(const std::vector<char>& flags, char value) {
  return std::count(flags.begin(), flags.end(), value) == static_cast<int64_t>(flags.size());
}

}  // namespace

Reductions::Reductions(ShardedModel& model, const FullyShardedDataParallelOptions& options,
                       FsdpStats& stats, JoinLeader& join_leader, std::function<void()> recover)
    : model_(model),
      options_(options),
      stats_(stats),
      join_leader_(join_leader),
      recover_(std::move(recover)),
      shard_wire_(lanes_of(model, options.wire.gradients, options.wire.parameters)),
      replica_wire_(sharding::Lanes(model.replicas, options.wire.gradients, 1)),
      norms_([this] { refuse_own_norms(); }, [this] { return shard_gradients(); }),
      stream_(model.device()) {}

Reductions::~Reductions() {
  recover_ = [] {};
  try {
    finish_late();
  } catch (const Error&) {
    // The program may use the gradients as before.
    for (auto& open : open_) open->flat.gradients.page->attach(open->flat.gradients.own_segment);
  }
}

void Reductions::begin(FlatParameter& flat, size_t turn, const std::string& tag) {
  make_segment(flat);
  const std::shared_ptr<Reduction> reduction(
      new Reduction{.flat = flat, .slot = flat.gradients.flat, .used = flat.gradients.has});
  set_aside(*reduction);
  try {
    start(*reduction, turn, tag);
  } catch (const comm::Diverged&) {
    reduction->dropped = true;
    settle(*reduction);
    throw;
  }
  open_.push_back(reduction);
  ++stats_.reductions;
}

void Reductions::begun() {
  if (options_.overlap == Overlap::none) finish_all();
}

/// The memory of the shards' gradients.
void Reductions::make_segment(FlatParameter& flat) {
  auto& gradients = flat.gradients;
  if (gradients.own_segment.defined()) return;
  auto options = flat.own_segment.options();
  if (flat.on_host()) options = options.pinned_memory(true);
  gradients.own_segment = at::empty({flat.own_segment.numel()}, options);
  if (model_.shard_group.size() == 1 && options_.overlap != Overlap::background) return;
  gradients.page = std::make_unique<sharding::Page>(this, flat.index, flat.own_segment.numel(),
                                                    flat.own_segment.options(), "");
  gradients.page->attach(gradients.own_segment);
}

/// Keeps the gradients that the shards have. From here until settle(), autograd gives a shard a new
/// gradient: from a term of the loss over the shards themselves.
void Reductions::set_aside(Reduction& reduction) {
  reduction.before.resize(reduction.used.size());
  for (size_t m = 0; m < reduction.used.size(); ++m) {
    const auto& shard = reduction.flat.shards[m].tensor;
    auto& grad = shard.mutable_grad();
    const bool adds = grad.defined() && (!reduction.used[m] || hooks_of(shard).empty());
    reduction.adds.push_back(adds);
    auto mine = reduction.flat.gradient_window(m);
    if (adds && grad.data_ptr() != mine.data_ptr()) mine.copy_(grad);  // not from here
    if (grad.defined() && !adds) reduction.before[m] = grad.clone();
    if (reduction.used[m]) grad = at::Tensor();
  }
}

void Reductions::start(Reduction& reduction, size_t turn, const std::string& tag) {
  auto& flat = reduction.flat;
  const double scale = 1.0 / join_leader_.divisor();
  const bool replicated = model_.replicas.size() > 1, narrow = comm::is_narrow(flat.reduce);
  // Otherwise collectives apply the factor: with replicas the sum over these does. For 16 bits each
  // sum applies its part, because a sum that is not a mean may be out of range.
  reduction.scale = replicated || narrow ? 1 : scale;
  const int shards = model_.shard_group.size();
  const bool directly = !replicated && flat.reduce == flat.dtype() && !flat.on_host() &&
                        all_are(reduction.used, 1) && all_are(reduction.adds, 0);
  const auto& counts = flat.layout.counts();
  const comm::CommStream::Scope on_comm_stream(stream_);
  auto shard_group = shard_wire_.group(turn), replicas = replica_wire_.group();
  const auto feedback = shard_wire_.scope(flat.index);
  if (replicated) {
    reduction.part = at::empty({flat.own_segment.numel()}, flat.gradient_options());
    auto sum = shard_group.reduce_scatter_each_async(
        reduction.slot, counts,
        [part = reduction.part](int64_t offset, const at::Tensor& run) {
          part.narrow(0, offset, run.numel()).copy_(run);
        },
        narrow ? 1.0 / shards : 1, tag);
    sum.wait();
    const auto replica_feedback = replica_wire_.scope(flat.index);
    reduction.work =
        replicas.all_reduce_async(reduction.part, narrow ? scale * shards : scale, tag);
  } else if (directly) {
    reduction.work = shard_group.reduce_scatter_into_async(reduction.slot, counts,
                                                           flat.gradients.own_segment, scale, tag);
  } else {
    reduction.work = shard_group.reduce_scatter_each_async(
        reduction.slot, counts,
        callback_guard_.guard([this, &reduction](int64_t offset, const at::Tensor& run) {
          add(reduction, offset, run);
        }),
        narrow ? scale : 1, tag);
  }
  reduction.mark = stream_.mark();
}

/// Adds or copies a part of the sum, which begins at `offset` of the own segment, to the gradients
/// of the shards in it.
void Reductions::add(Reduction& reduction, int64_t offset, const at::Tensor& sum) {
  if (reduction.dropped) return;
  at::NoGradGuard no_grad;
  const auto& flat = reduction.flat;
  const auto& segment = flat.gradients.own_segment;
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
      target.copy_(part);
      if (reduction.scale != 1) target.mul_(reduction.scale);
    }
  }
}

/// Waits once for all sums of the backward.
void Reductions::wait_for_host_sums() {
  if (!on_the_way_.empty()) {
    stream_.wait_for_current();
    on_the_way_.apply();
  }
  for (auto& reduction : std::exchange(unsettled_, {})) settle(*reduction);
}

/// The gradients of the shards become the means plus the gradients that autograd has added to the
/// shards since reduce(). If a reduction was dropped, they keep their former values. Hooks of a
/// shard get the gradient of this backward alone, as hooks of a parameter do.
void Reductions::settle(Reduction& reduction) {
  if (std::exchange(reduction.settled, true)) return;
  const at::NoGradGuard no_grad;
  for (size_t m = 0; m < reduction.used.size(); ++m) {
    if (!reduction.used[m]) continue;
    const auto& shard = reduction.flat.shards[m].tensor;
    const auto& before = reduction.before[m];
    auto mean = reduction.flat.shard_gradient(m);
    if (!reduction.dropped) {
      for (const auto& hook : hooks_of(shard)) mean.copy_((*hook)({mean.clone()})[0]);
      if (before.defined()) mean.add_(before);
    } else if (!reduction.adds[m]) {
      mean = before;
    }
    auto& grad = shard.mutable_grad();
    if (!mean.defined()) continue;
    if (grad.defined()) mean.add_(grad);
    grad = mean;
  }
}

/// The ranks diverged before `reduction`: its gradients stay in the slot, and the gradients of the
/// shards keep their former values.
void Reductions::fail(const std::shared_ptr<Reduction>& reduction) {
  reduction->dropped = true;
  auto& flat = reduction->flat;
  if (reduction->late) {
    open_.pop_front();
    flat.gradients.page->attach(flat.gradients.own_segment);
  }
  settle(*reduction);
  failed_.push_back(reduction);
  --stats_.reductions;
}

void Reductions::finish_one() {
  const auto reduction = open_.front();
  if (!reduction->late) open_.pop_front();  // the error of a late one is thrown at each use
  try {
    advised([&] { reduction->work.wait(); });
  } catch (const comm::Diverged&) {
    fail(reduction);
    if (model_.diverged) return;
    throw;
  }
  if (reduction->late) open_.pop_front();
  stream_.join(reduction->mark);
  auto& flat = reduction->flat;
  if (reduction->part.defined()) add(*reduction, 0, reduction->part);
  if (!reduction->dropped) {
    on_the_way_.take(reduction->on_the_way);
    shard_wire_.commit(flat.index);
    replica_wire_.commit(flat.index);
  }
  stats_.gradient_bytes -= static_cast<int64_t>(reduction->slot.nbytes());
  flat.gradients.slots->give(reduction->slot, !is_large(flat));
  if (reduction->late) flat.gradients.page->attach(flat.gradients.own_segment);
  else if (on_the_way_.empty()) settle(*reduction);
  else unsettled_.push_back(reduction);
}

void Reductions::make_room() {
  const size_t most = model_.shard_group.same_host() ? kMaxOpen : kMaxOpenBetweenHosts;
  while (open_.size() >= most) finish_one();
}

void Reductions::finish(const FlatParameter& flat) {
  const auto same = [&flat](const auto& open) { return &open->flat == &flat; };
  while (std::any_of(open_.begin(), open_.end(), same)) finish_one();
  if (flat.gradients.reduced) wait_for_host_sums();
}

void Reductions::finish_all() {
  while (!open_.empty()) finish_one();
}

void Reductions::finish_late() {
  recovering(recover_, [this] {
    while (!open_.empty() && open_.front()->late) finish_one();
  });
}

/// True if the gradients of the shards lack only memory.
bool Reductions::may_be_late(const Reduction& reduction) const {
  if (options_.overlap != Overlap::background || reduction.dropped || reduction.flat.on_host())
    return false;
  for (size_t m = 0; m < reduction.used.size(); ++m) {
    const auto& shard = reduction.flat.shards[m].tensor;
    const bool in_place =
        !reduction.used[m] || (!shard.grad().defined() && hooks_of(shard).empty());
    if (!in_place || reduction.before[m].defined()) return false;
  }
  return true;
}

/// Where ranks have used different parameters, they are likely to do so again.
void Reductions::finish_early() {
  const bool late = !model_.has_diverged && on_the_way_.empty() &&
                    std::all_of(open_.begin(), open_.end(),
                                [this](const auto& open) { return may_be_late(*open); });
  if (!late) finish_all();
}

void Reductions::end_backward() {
  norms_.reset();
  finish_early();
  for (auto& open : open_) {
    settle(*open);
    open->late = true;
    open->flat.gradients.page->detach();
  }
  wait_for_host_sums();
}

void Reductions::drop() {
  for (auto& reduction : open_) {
    reduction->dropped = true;
    settle(*reduction);
  }
  wait_for_host_sums();
}

void Reductions::end_step(StepEnd end) {
  for (auto* wire : {&shard_wire_, &replica_wire_}) {
    wire->end_step(end.used);
    wire->rescale(end.scale);
  }
}

void Reductions::need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) {
  {
    const std::lock_guard lock(*model_.mutex);
    recovering(recover_, [&] {
      for (const auto& use : uses)
        while (!use.page->attached() && !open_.empty()) finish_one();
    });
  }
  if (model_.shard_group.size() > 1) norms_.need(uses, op);
}

std::set<sharding::LocalNorms::Gradient> Reductions::shard_gradients() const {
  std::set<sharding::LocalNorms::Gradient> result;
  for (const auto* flat : model_.flats) {
    for (const auto& shard : flat->shards)
      if (shard.tensor.grad().defined()) result.emplace(flat->index, shard.at);
  }
  return result;
}

void Reductions::refuse_own_norms() const {
  throw UsageError(fmt::format(
      "{}: rank {}: the gradients of the shards are scaled by a norm of this rank's elements only "
      "(torch::nn::utils::clip_grad_norm_ over fsdp.parameters()?); expected "
      "fsdp.clip_grad_norm_(…), whose norm is that of all ranks",
      kName, model_.world.rank()));
}

}  // namespace tessera::fsdp
