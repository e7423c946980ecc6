// Members of ProcessGroup that exchange control data: byte strings, colors of a split, contracts,
// failures.
#include <algorithm>
#include <cstring>
#include <numeric>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <xxhash.h>

#include "comm/device/backends.h"
#include "comm/group/argument_checks.h"
#include "comm/group/make_transport.h"
#include "tessera/detail/report_to_launcher.h"

namespace tessera {

using comm::Headers;
using comm::Op;
using comm::OpHeader;
using comm::Transport;

namespace {

/// The use of the byte strings of a collective, besides the caller's tag.
std::string bytes_tag(const char* call, const std::string& tag) {
  return tag.empty() ? call : fmt::format("{}, {}", call, tag);
}

/// Every rank's string on every rank.
std::vector<std::string> exchange_bytes(ProcessGroup::Impl& impl, const std::string& mine, int root,
                                        const std::string& tag) {
  if (impl.alone()) {
    impl.count(&CommStats::bytes, 0, 0);
    return {mine};
  }
  OpHeader header;
  header.op = Op::bytes;
  header.numel = static_cast<int64_t>(mine.size());
  header.root = root;
  header.free_numel = 1;
  std::vector<std::string> result;
  const auto body = [&](Transport& transport, const Headers& headers) {
    comm::Counts sizes;
    for (const auto& h : headers) sizes.push_back(h.numel);
    result = comm::gather_texts(transport, impl.world.rank, mine, sizes);
  };
  impl.issue({header, body, {}, tag});
  uint64_t total = 0;
  for (const auto& text : result) total += text.size();
  impl.count(&CommStats::bytes, mine.size() * (impl.world.size - 1), total - mine.size());
  return result;
}

/// Every rank's number on every rank. It travels in the header, whose exchange takes O(log W)
/// messages a rank. No data follows it.
std::vector<int64_t> exchange_numbers(ProcessGroup::Impl& impl, Op op, int64_t mine,
                                      const std::string& tag) {
  OpHeader header;
  header.op = op;
  header.root = -1;
  header.free_numel = 1;
  header.numel = mine;
  std::vector<int64_t> numbers;
  const auto body = [&](Transport&, const Headers& headers) {
    for (const auto& h : headers) numbers.push_back(h.numel);
  };
  impl.issue({header, body, {}, tag});
  impl.count(&CommStats::bytes, 0, 0);
  return numbers;
}

/// Of comm/device/backends.h.
int64_t number_of_device(at::Device device, const comm::DeviceBackend* backend) {
  if (!c10::impl::hasDeviceGuardImpl(device.type())) return comm::kNotSeen;
  const c10::impl::VirtualGuardImpl guard(device.type());
  if (std::max<int>(device.index(), 0) >= guard.deviceCount()) return comm::kNotSeen;
  if (!device.has_index()) device = guard.getDevice();
  return comm::number_of_identity(backend && backend->identity ? backend->identity(device) : "");
}

}  // namespace

std::vector<std::string> ProcessGroup::all_gather_bytes(const std::string& mine,
                                                        const std::string& tag) {
  return exchange_bytes(*impl_, mine, -1, bytes_tag("all_gather_bytes", tag));
}

std::string ProcessGroup::broadcast_bytes(const std::string& mine, int root,
                                          const std::string& tag) {
  check_root(*impl_, "broadcast_bytes", root);
  return exchange_bytes(*impl_, rank() == root ? mine : std::string(), root,
                        bytes_tag("broadcast_bytes", tag))[root];
}

std::vector<std::string> ProcessGroup::gather_bytes(const std::string& mine, int root,
                                                    const std::string& tag) {
  check_root(*impl_, "gather_bytes", root);
  if (impl_->alone()) return all_gather_bytes(mine);
  OpHeader header;
  header.op = Op::bytes;
  header.numel = static_cast<int64_t>(mine.size());
  header.root = root;
  header.free_numel = 1;
  std::vector<std::string> result;
  uint64_t total = 0;
  const auto body = [&](Transport& transport, const Headers& headers) {
    std::vector<int64_t> recv(size(), 0), send(size(), 0);
    send[root] = static_cast<int64_t>(mine.size());
    for (int r = 0; rank() == root && r < size(); ++r) total += recv[r] = headers[r].numel;
    const auto options = at::TensorOptions().dtype(at::kByte);
    auto input = at::empty({send[root]}, options),
         output = at::empty({static_cast<int64_t>(total)}, options);
    if (!mine.empty()) std::memcpy(input.data_ptr(), mine.data(), mine.size());
    transport.all_to_all(output, input, recv, send);
    if (rank() != root) return;
    const auto* data = static_cast<const char*>(output.data_ptr());
    for (int r = 0; r < size(); data += recv[r++]) result.emplace_back(data, recv[r]);
  };
  impl_->issue({header, body, {}, bytes_tag("gather_bytes", tag)});
  impl_->count(&CommStats::bytes, rank() == root ? 0 : mine.size(),
               rank() == root ? total - mine.size() : 0);
  return result;
}

std::optional<ProcessGroup> ProcessGroup::split(int color) {
  if (impl_->alone()) return color < 0 ? std::nullopt : std::optional(ProcessGroup());
  const auto colors = exchange_numbers(*impl_, Op::split, color, "");
  const auto number = ++impl_->splits;
  if (color < 0) return std::nullopt;
  auto world = impl_->world;
  world.world_ranks.clear();
  world.hosts.clear();
  world.arena = nullptr;
  world.wire = WireFormat::float32;
  for (int r = 0; r < size(); ++r) {
    if (colors[r] != color) continue;
    if (r == rank()) world.rank = static_cast<int>(world.world_ranks.size());
    world.world_ranks.push_back(impl_->world.world_ranks[r]);
    if (!impl_->world.hosts.empty()) world.hosts.push_back(impl_->world.hosts[r]);
  }
  world.size = static_cast<int>(world.world_ranks.size());
  if (world.size == 1) {
    auto alone = Impl::make();
    alone->world.world_ranks = world.world_ranks;
    alone->world.options = world.options;
    return ProcessGroup(std::move(alone));
  }
  require(impl_->world.store != nullptr, *impl_, "split",
          "this group was made by the caller without a store");
  world.same_host =
      impl_->world.same_host || (!world.hosts.empty() && comm::all_equal(world.hosts));
  world.store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("split{}/{}/", number, color),
                                                       impl_->world.store);
  world.start_group.store = comm::store_of_start(impl_->world);
  auto transport = comm::make_transport(world);
  auto child = Impl::make(std::move(world), std::move(transport));
  impl_->add_child(child);
  return ProcessGroup(std::move(child));
}

ProcessGroup ProcessGroup::with_wire(WireFormat format) {
  if (impl_->alone() || same_host()) return *this;
  check_contract("ProcessGroup.with_wire", {to_string(format)});
  if (format == WireFormat::float32) return *this;
  const auto needs = [&](bool condition, const std::string& what) {
    require(condition, *impl_, "with_wire", fmt::format("{} needs {}", to_string(format), what));
  };
  const auto backend = impl_->world.options.backend;
  needs(backend != Backend::NCCL && !impl_->world.device &&
            impl_->world.options.staged_device == at::kCPU,
        fmt::format("the backend Auto; this group has {}", backend_name()));
  needs(!impl_->world.options.check_results, "check_results off; it compares exact sums");
  needs(!impl_->world.hosts.empty(), "to know which ranks share a host");
  comm::World world = impl_->world;
  world.wire = format;
  return ProcessGroup(impl_->duplicate(std::move(world), "with_wire", impl_));
}

ProcessGroup ProcessGroup::with_device(at::Device device) {
  const auto type = device.type();
  if (moves(type)) return *this;
  const auto name = c10::DeviceTypeName(type, true);
  check_contract("ProcessGroup.with_device", {name});
  comm::World world = impl_->world;
  world.options.staged_device = at::kCPU;
  const bool chooses = world.options.backend == Backend::Auto;
  world.device = chooses ? comm::backend_of(type, world) : nullptr;
  const auto devices =
      exchange_numbers(*impl_, Op::number, number_of_device(device, world.device.get()), "devices");
  const auto unseeing = std::find(devices.begin(), devices.end(), comm::kNotSeen);
  if (unseeing != devices.end()) {
    throw UsageError(fmt::format(
        "ProcessGroup.with_device: rank {} sees no device {}; expected one that the process sees",
        unseeing - devices.begin(), unseeing - devices.begin() == rank() ? device.str() : name));
  }
  const auto same = comm::ranks_of_one_device(devices, world.hosts);
  if (chooses && !world.device) {
    world.staged_because = fmt::format("this build has no backend for {}{}", name,
                                       type == at::kCUDA ? " (-DTESSERA_WITH_NCCL=ON)" : "");
  } else if (same) {
    world.staged_because = fmt::format(
        "ranks {} and {} use the same device of their host, and {} "
        "needs one for each rank",
        same->first, same->second, world.device->name);
    world.device = nullptr;
  }
  if (!world.device) world.options.staged_device = type;
  return ProcessGroup(impl_->duplicate(std::move(world), "with_device"));
}

ProcessGroup ProcessGroup::duplicate() {
  if (impl_->alone()) return *this;
  check_contract("ProcessGroup.duplicate", {});
  return ProcessGroup(impl_->duplicate(impl_->world, "duplicate"));
}

void ProcessGroup::check_contract(const std::string& component,
                                  const std::vector<std::string>& entries) {
  if (impl_->alone()) return;
  XXH64_state_t* state = XXH64_createState();
  XXH64_reset(state, entries.size());
  XXH64_update(state, component.c_str(), component.size() + 1);
  for (const auto& entry : entries) XXH64_update(state, entry.c_str(), entry.size() + 1);
  const auto digest = static_cast<int64_t>(XXH64_digest(state) >> 1);
  XXH64_freeState(state);
  const auto digests = exchange_numbers(*impl_, Op::number, digest, "check_contract");
  if (std::all_of(digests.begin(), digests.end(),
                  [&](int64_t other) { return other == digests[0]; }))
    return;

  std::string all;
  for (const auto& entry : entries) all += entry + '\n';
  const auto lists = all_gather_bytes(component + "\n" + all, "check_contract");
  int other = 0;
  while (lists[other] == lists[rank()]) ++other;
  const auto lines = [](const std::string& text) {
    std::vector<std::string> result;
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1)
      result.push_back(text.substr(at, end - at));
    return result;
  };
  const auto mine = lines(lists[rank()]), theirs = lines(lists[other]);
  size_t index = 0;
  while (index < mine.size() && index < theirs.size() && mine[index] == theirs[index]) ++index;
  const auto at = [&](const std::vector<std::string>& list) {
    return index < list.size() ? "'" + list[index] + "'" : std::string("nothing more");
  };
  const std::string text =
      index == 0 ? fmt::format(
                       "ProcessGroup: the ranks construct different things: rank {} {}, rank {} {}",
                       rank(), at(mine), other, at(theirs))
                 : fmt::format(
                       "{}: the ranks differ: entry {} is {} on rank {} ({} entries) and {} on "
                       "rank {} ({} entries)",
                       component, index - 1, at(mine), rank(), mine.size() - 1, at(theirs), other,
                       theirs.size() - 1);
  const auto began =
      detail::minority(size(), [&](int a, int b) { return digests[a] == digests[b]; });
  detail::report_agreed(impl_->world.in_world(began), text);
  throw UsageError(text);
}

void ProcessGroup::fail(const std::string& message) { impl_->fail(message); }
bool ProcessGroup::ended() const { return impl_->ended(); }

at::Device ProcessGroup::control_device() const { return at::kCPU; }
bool ProcessGroup::moves(at::DeviceType type) const {
  return type == at::kCPU || impl_->alone() || impl_->transport->device_type() == type;
}

}  // namespace tessera
