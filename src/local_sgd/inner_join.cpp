#include "local_sgd/inner_join.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/error.h"

namespace tessera {

LocalSgd::InnerJoin::InnerJoin(ProcessGroup world,
                               std::vector<std::reference_wrapper<Joinable>> inner,
                               std::function<void()> shadow)
    : world_(std::move(world)), inner_(std::move(inner)), shadow_(std::move(shadow)) {
  const auto& all = world_.world_ranks();
  std::vector<int> ranks{all[static_cast<size_t>(world_.rank())]};
  if (!inner_.empty()) ranks = inner_[0].get().join_group().world_ranks();
  for (const auto& joinable : inner_) {
    if (joinable.get().join_group().world_ranks() == ranks) continue;
    throw UsageError(
        fmt::format("LocalSgd.set_join: rank {}: the joinables of the inner group have the ranks "
                    "{} and {}; expected the same ranks",
                    world_.rank(), fmt::join(ranks, ", "),
                    fmt::join(joinable.get().join_group().world_ranks(), ", ")));
  }
  for (const int rank : ranks) {
    const auto found = std::find(all.begin(), all.end(), rank);
    if (found == all.end()) {
      throw UsageError(
          fmt::format("LocalSgd.set_join: rank {}: rank {} of the inner group is not one of the "
                      "ranks {}; expected a group with all ranks",
                      world_.rank(), rank, fmt::join(all, ", ")));
    }
    members_.push_back(static_cast<size_t>(found - all.begin()));
  }
}

void LocalSgd::InnerJoin::on_join_iteration(const JoinIteration& iteration) {
  const int size = static_cast<int>(members_.size());
  JoinIteration inner{size, 0, size, {}};
  if (!iteration.has_data.empty()) {
    inner.active_ranks = 0;
    for (int rank = size - 1; rank >= 0; --rank) {
      const bool has_data = iteration.has_data[members_[static_cast<size_t>(rank)]];
      inner.has_data.insert(inner.has_data.begin(), has_data);
      if (!has_data) continue;
      ++inner.active_ranks;
      inner.first_active = rank;
    }
    if (inner.active_ranks == size) inner.has_data.clear();
    // The divisor shows whether ranks without data count.
    if (iteration.divisor != world_.size()) inner.divisor = inner.active_ranks;
  }
  active_ = inner.active_ranks > 0;
  if (!active_) return;
  if (!iteration.has_data.empty() || iteration.active_ranks == world_.size())
    last_active_ = inner.first_active;
  for (auto& joinable : inner_) joinable.get().on_join_iteration(inner);
}

void LocalSgd::InnerJoin::shadow_step() {
  if (!active_) return;
  if (shadow_) return shadow_();
  for (auto& joinable : inner_) joinable.get().shadow_step();
}

void LocalSgd::InnerJoin::finish_join() {
  for (auto& joinable : inner_) joinable.get().finish_join(last_active_);
}

}  // namespace tessera
