#include "sharding/gradients/forward_writes.h"

#include <fmt/format.h>

#include "sharding/checksum.h"
#include "tessera/error.h"

namespace tessera::sharding {

void ForwardWrites::begin(bool evaluates) {
  if (!versions_.empty() && (evaluates || !evaluates_)) return;
  evaluates_ = evaluates;
  versions_.clear();
  for (const auto& parameter : parameters_) versions_.push_back(parameter.tensor._version());
}

bool ForwardWrites::written(size_t i) const {
  return !paused_ && i < versions_.size() && parameters_[i].tensor._version() != versions_[i];
}

void ForwardWrites::compare(const std::string& component, ProcessGroup group) {
  for (size_t i = 0; i < versions_.size(); ++i)
    if (written(i)) compare(component, group, i);
  versions_.clear();
}

void ForwardWrites::compare(const std::string& component, ProcessGroup group, size_t i) const {
  if (group.size() == 1) return;
  const auto& [name, tensor] = parameters_[i];
  const auto all = group.all_gather_bytes(fmt::format("{:016x}", checksum(tensor)),
                                          "parameter written before backward: " + name);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw UsageError(fmt::format(
        "{}: rank {}: parameter {} was written before backward, and has other values on rank {} "
        "than on rank 0 (does forward write it, as Embedding with max_norm does?); expected a "
        "forward that writes no parameter, or the same values on all ranks",
        component, group.rank(), name, rank));
  }
}

}  // namespace tessera::sharding
