#include <map>

#include <fmt/format.h>

#include "comm/group/process_group_impl.h"
#include "tessera/error.h"
#include "tessera/local_sgd.h"

namespace tessera {
namespace {

/// For each rank the number of its group. All ranks have the same arguments, so all ranks throw the
/// same error.
std::vector<int> group_numbers(const ProcessGroup& world, int64_t group_size) {
  const int ranks = world.size();
  std::vector<int> numbers;
  if (group_size < 0 || (group_size > 0 && ranks % group_size != 0)) {
    throw UsageError(fmt::format(
        "local_sgd_groups: rank {}: group_size is {} with {} ranks; expected a divisor of the "
        "number of ranks, or 0 for the ranks of a host",
        world.rank(), group_size, ranks));
  }
  if (group_size > 0) {
    for (int rank = 0; rank < ranks; ++rank) numbers.push_back(static_cast<int>(rank / group_size));
    return numbers;
  }
  numbers = world.impl()->world.hosts;
  if (world.same_host() || numbers.empty()) {
    throw UsageError(fmt::format(
        "local_sgd_groups: rank {}: {}; expected group_size > 0", world.rank(),
        world.same_host() ? "all ranks are on one host" : "the hosts of the ranks are unknown"));
  }
  return numbers;
}

}  // namespace

LocalSgdGroups local_sgd_groups(ProcessGroup& world, int64_t group_size) {
  const std::vector<int> numbers = group_numbers(world, group_size);
  std::map<int, int> sizes;
  int place = 0;  // number of this rank in its group
  for (int rank = 0; rank < world.size(); ++rank) {
    const int number = numbers[static_cast<size_t>(rank)];
    if (rank == world.rank()) place = sizes[number];
    ++sizes[number];
  }
  for (const auto& [number, size] : sizes) {
    if (size == sizes.begin()->second) continue;
    throw UsageError(fmt::format(
        "local_sgd_groups: rank {}: host {} has {} ranks and host {} has {}; expected the same "
        "number on each host, or group_size > 0",
        world.rank(), sizes.begin()->first, sizes.begin()->second, number, size));
  }
  auto inner = world.split(numbers[static_cast<size_t>(world.rank())]);
  auto outer = world.split(place);
  return {*inner, *outer};
}

}  // namespace tessera
