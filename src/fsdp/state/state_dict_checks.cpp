#include "fsdp/state/state_dict_checks.h"

#include <algorithm>

#include <fmt/format.h>

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
