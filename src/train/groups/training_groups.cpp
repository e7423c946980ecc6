#include "train/groups/training_groups.h"

#include <algorithm>

#include <fmt/format.h>

namespace tessera::train {

int TrainingGroups::rank_in_run(const ProcessGroup& group, int rank) const {
  const auto& all = all_.world_ranks();
  const int in_world = group.world_ranks()[static_cast<size_t>(rank)];
  return static_cast<int>(std::find(all.begin(), all.end(), in_world) - all.begin());
}

std::string TrainingGroups::describe() const {
  return fmt::format("{} group{} of {} rank{}", count_, count_ == 1 ? "" : "s", inner_.size(),
                     inner_.size() == 1 ? "" : "s");
}

}  // namespace tessera::train
