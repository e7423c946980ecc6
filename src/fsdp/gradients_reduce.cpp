#include <algorithm>

#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "comm/base/tree_sum.h"
#include "fsdp/gradients.h"
#include "memory/heap.h"

namespace tessera::fsdp {

namespace {

/// A short text that identifies the parameters with gradients, so that a difference between ranks
/// is detected.
std::string digest(const std::vector<char>& used) {
  uint64_t hash = 1469598103934665603ull;
  for (const char bit : used) hash = (hash ^ static_cast<uint64_t>(bit)) * 1099511628211ull;
  return fmt::format("{} of {} parameters used, set {:04x}",
                     std::count(used.begin(), used.end(), 1), used.size(), hash & 0xffff);
}

/// The hooks that the program has registered on a tensor (register_hook).
const auto& hooks_of(const at::Tensor& tensor) { return torch::autograd::impl::hooks(tensor); }

}  // namespace

void Gradients::reduce(size_t f) {
  auto& flat = model_.flats[f];
  auto& pending = pending_[f];
  if (join_leader_.must_broadcast())
    join_leader_.broadcast_event(GradientsReduced{f, forwards_, pending.has});
  const auto same = [f](const auto& open) { return open->flat == f; };
  while (std::any_of(open_.begin(), open_.end(), same)) finish_one();  // this reduction adds to it
  if (pending.reduced) wait_for_host_sums();
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
  reduction->before.resize(flat.members.size());
  for (size_t m = 0; m < flat.members.size(); ++m) {
    const auto& shard = flat.shards[m].tensor;
    auto& grad = shard.mutable_grad();
    const bool adds = grad.defined() && (!pending.has[m] || hooks_of(shard).empty());
    reduction->adds.push_back(adds);
    auto mine = window(f, m);
    if (adds && grad.data_ptr() != mine.data_ptr()) mine.copy_(grad);  // not from here
    if (grad.defined() && !adds) reduction->before[m] = grad.clone();
    // From here until settle(), autograd gives the shard a new gradient: that of a term of the loss
    // over the shards themselves.
    if (pending.has[m]) grad = at::Tensor();
  }
  // Ranks that have made different numbers of passes would reduce gradients of different steps.
  const auto tag = fmt::format("gradients of unit {}: {}; backward {} after {} forwards",
                               display_name(model_.units[flat.unit]), digest(pending.has),
                               backwards_ + 1, forwards_);
  const double scale = 1.0 / join_leader_.divisor();
  const bool replicated = model_.replicas.size() > 1, narrow = comm::is_narrow(flat.reduce);
  // Otherwise a collective applies it: with replicas that of their sum, and for 16 bits each of
  // them, because a sum that is not a mean may be out of range.
  reduction->scale = replicated || narrow ? 1 : scale;
  const int shards = model_.shard_group.size();
  const auto all = [](const std::vector<char>& flags, char value) {
    return std::count(flags.begin(), flags.end(), value) == static_cast<int64_t>(flags.size());
  };
  const bool directly = !replicated && flat.reduce == flat.dtype &&
                        flat.device == flat.own_segment.device() && all(reduction->used, 1) &&
                        all(reduction->adds, 0);
  {
    const comm::CommStream::Scope on_comm_stream(stream_);
    auto shard_group = shard_wire_.group(order_.size() - 1), replicas = replica_wire_.group();
    const auto feedback = shard_wire_.scope(f);
    if (replicated) {
      reduction->part = at::empty({own}, flat.gradient_options());
      auto sum = shard_group.reduce_scatter_each_async(
          pending.flat, flat.layout.counts(),
          [part = reduction->part](int64_t offset, const at::Tensor& run) {
            part.narrow(0, offset, run.numel()).copy_(run);
          },
          narrow ? 1.0 / shards : 1, tag);
      sum.wait();
      const auto replica_feedback = replica_wire_.scope(f);
      reduction->work =
          replicas.all_reduce_async(reduction->part, narrow ? scale * shards : scale, tag);
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
          narrow ? scale : 1, tag);
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
      target.copy_(part);
      if (reduction.scale != 1) target.mul_(reduction.scale);
    }
  }
}

/// Waits once for all sums of the backward.
void Gradients::wait_for_host_sums() {
  if (!on_the_way_.empty()) {
    stream_.wait_for_current();
    on_the_way_.apply();
  }
  for (auto& reduction : std::exchange(unsettled_, {})) settle(*reduction);
}

/// The gradients of the shards are the means, and what autograd has added to the shards themselves
/// since reduce(). Without the mean of a dropped reduction, they are what they were. Hooks of a
/// shard get what those of a parameter get: the gradient of this backward alone.
void Gradients::settle(Reduction& reduction) {
  if (std::exchange(reduction.settled, true)) return;
  const at::NoGradGuard no_grad;
  for (size_t m = 0; m < reduction.used.size(); ++m) {
    if (!reduction.used[m]) continue;
    const auto& shard = model_.flats[reduction.flat].shards[m].tensor;
    const auto& before = reduction.before[m];
    auto mean = shard_gradient(reduction.flat, m);
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

void Gradients::finish_one() {
  auto reduction = open_.front();
  open_.pop_front();
  auto& flat = model_.flats[reduction->flat];
  advised([&] { reduction->work.wait(); });
  stream_.join(reduction->mark);
  if (reduction->part.defined()) add(*reduction, 0, reduction->part);
  if (!reduction->dropped) {
    on_the_way_.take(reduction->on_the_way);
    shard_wire_.commit(reduction->flat);
    replica_wire_.commit(reduction->flat);
  }
  stats_.gradient_bytes -= static_cast<int64_t>(reduction->slot.nbytes());
  flat.gradient_slots->give(reduction->slot, !is_large(reduction->flat));
  if (on_the_way_.empty()) settle(*reduction);
  else unsettled_.push_back(reduction);
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

}  // namespace tessera::fsdp
