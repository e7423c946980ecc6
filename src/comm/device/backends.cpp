#include "comm/device/backends.h"

#include <algorithm>
#include <map>

#include <xxhash.h>

#include "comm/device/nccl_backend.h"

namespace tessera::comm {
namespace {

std::map<at::DeviceType, std::shared_ptr<const DeviceBackend>>& added() {
  static auto& all = *new std::map<at::DeviceType, std::shared_ptr<const DeviceBackend>>();
  return all;
}

}  // namespace

std::shared_ptr<const DeviceBackend> backend_of(at::DeviceType type, const World& world) {
  const auto found = added().find(type);
  if (found != added().end()) return found->second;
  return type == at::kCUDA && kHasNccl ? nccl_backend(world) : nullptr;
}

void add_backend(std::shared_ptr<const DeviceBackend> backend) {
  const auto type = backend->type;
  added()[type] = std::move(backend);
}

int64_t number_of_identity(const std::string& identity) {
  if (identity.empty()) return 0;
  const auto digest = static_cast<int64_t>(XXH3_64bits(identity.data(), identity.size()) >> 1);
  return std::max(digest, kNotSeen + 1);
}

std::optional<std::pair<int, int>> ranks_of_one_device(const std::vector<int64_t>& devices,
                                                       const std::vector<int>& hosts) {
  const auto host_of = [&](size_t rank) { return hosts.empty() ? 0 : hosts[rank]; };
  for (size_t a = 0; a < devices.size(); ++a) {
    for (size_t b = a + 1; b < devices.size(); ++b)
      if (devices[a] != 0 && devices[a] == devices[b] && host_of(a) == host_of(b))
        return std::pair(static_cast<int>(a), static_cast<int>(b));
  }
  return std::nullopt;
}

}  // namespace tessera::comm
