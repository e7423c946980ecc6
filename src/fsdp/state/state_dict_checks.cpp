#include "fsdp/state/state_dict_checks.h"

#include <algorithm>

#include <fmt/format.h>

#include "sharding/checksum.h"
#include "tessera/error.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/agreement.h"

namespace tessera::fsdp {

std::vector<std::pair<std::string, at::Tensor>> unsharded(const ShardedModule& sharded) {
  std::vector<std::pair<std::string, at::Tensor>> result;
  for (const auto& [name, tensor] : named_parameters(sharded.module)) {
    const auto& known = sharded.model.parameters;
    if (std::none_of(known.begin(), known.end(), [&tensor = tensor](const auto& parameter) {
          return parameter.tensor.is_same(tensor);
        }))
      result.emplace_back(name, tensor);
  }
  for (const auto& item : sharded.module.named_buffers())
    if (item.value().defined()) result.emplace_back(item.key(), item.value());
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> unsharded_values(const ShardedModule& sharded) {
  auto result = unsharded(sharded);
  for (auto& [name, tensor] : result) {
    auto dtype = tensor.scalar_type();
    for (const auto& buffer : sharded.model.buffers)
      if (buffer.tensor.is_same(tensor)) dtype = buffer.own;
    tensor = tensor.detach().to(dtype).resolve_conj().resolve_neg();
  }
  return result;
}

void check_destination(const ShardedModule& sharded, const char* call, int to) {
  const int size = sharded.model.world.size();
  if (to >= size)
    throw UsageError(fmt::format("{}: {}: to is {}; expected a rank below {}, or -1 for all",
                                 sharded.prefix(), call, to, size));
}

void check_same_values(const ShardedModule& sharded, const char* call,
                       const std::vector<std::pair<std::string, at::Tensor>>& values) {
  auto group = sharded.model.world;
  if (group.size() == 1) return;
  std::string own;  // a line for each tensor
  for (const auto& [name, tensor] : values)
    own += fmt::format("{} {:016x}\n", name, sharding::checksum(tensor));
  const auto all = group.all_gather_bytes(own, std::string("values of ") + call);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto [here, there] =
        std::mismatch(all[0].begin(), all[0].end(), all[rank].begin(), all[rank].end());
    if (here == all[0].end() && there == all[rank].end()) continue;
    const auto& longer = here == all[0].end() ? all[rank] : all[0];
    const auto at = static_cast<size_t>(here - all[0].begin());
    const auto begin = at == 0 ? 0 : longer.rfind('\n', at - 1) + 1;
    throw UsageError(fmt::format(
        "{}: {}: {} has other values on rank {} than on rank 0; expected the same "
        "state on all ranks",
        sharded.prefix(), call, longer.substr(begin, longer.find(' ', begin) - begin), rank));
  }
}

void check_on_all_ranks(const ShardedModule& sharded, const char* call,
                        const std::function<void()>& check) {
  tessera::agree(sharded.model.world, [&] {
    try {
      check();
    } catch (const std::exception& error) {
      throw UsageError(fmt::format("{}: {}: {}", kName, call, message_of(error)));
    }
  });
}

}  // namespace tessera::fsdp
