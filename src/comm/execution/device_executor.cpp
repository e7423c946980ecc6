// Collectives on tensors of an accelerator.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/base/flat_tensor.h"
#include "comm/device/backends.h"
#include "comm/execution/group_stream.h"
#include "comm/execution/host_executor.h"
#include "comm/p2p/liveness.h"
#include "tessera/step/agreement.h"

namespace tessera::comm {
namespace {

/// The time that a backend has to end a collective. With the time-out and a beat it is at most two
/// seconds longer than the time-out.
constexpr std::chrono::milliseconds kUntilFreed{1500}, kPoll{10};

/// Calls `first` and then waits for the device to reach `mark`, for at most kUntilFreed. False: it
/// has not reached it. Another thread makes the calls, because the device's library may block.
bool is_reached(const CommStream::Mark& mark, std::function<void()> first) {
  auto reached = std::make_shared<std::promise<void>>();
  auto future = reached->get_future();
  std::thread([mark, reached, first = std::move(first)] {
    try {
      first();
      while (mark && !mark->query()) std::this_thread::sleep_for(kPoll);
    } catch (...) {  // the device has an error, and runs nothing any more
    }
    reached->set_value();
  }).detach();
  return future.wait_for(kUntilFreed) == std::future_status::ready;
}

class DeviceExecutor : public Executor {
 public:
  explicit DeviceExecutor(HostExecutor& host) : host_(host) {}
  Work issue(Call call, Mode mode) override;
  void drain() noexcept override;

 private:
  Work issue_on_stream(const Call& call, const CommStream& stream);
  void move(const Call& call, const Headers& headers);
  Work compare_later(const Call& call);
  /// Blocks until all ranks have issued a collective on the device, without check_collectives too.
  /// The first collective needs it: the backend connects the ranks and may wait for ever for an
  /// ended one.
  Headers compare_now(const Call& call);
  /// Before the first collective on the device, on which all ranks have agreed.
  void meet(Transport& control, const at::Device& device);
  /// Throws UsageError on all ranks if two of a host have the same device.
  void check_devices(Transport& control, const at::Device& device) const;
  /// Throws UsageError on all ranks if their ways to sum differ: they would hang.
  void check_order_of_sums(Transport& control) const;
  /// These ranks do not run any more, so the device may wait for them, and the host for the device.
  /// Ends the group and the device's collectives, or else the process. None: the store is silent.
  void lose(const std::vector<int>& lost);
  CommStream::Mark last();
  void set_last(CommStream::Mark mark);

  HostExecutor& host_;
  GroupStream stream_;
  bool met_ = false;  // all ranks have issued the first collective
  std::mutex mutex_;
  CommStream::Mark last_;               // the end of the last collective
  std::unique_ptr<Liveness> liveness_;  // the last member, because its thread uses the others
};

Work DeviceExecutor::issue(Call call, Mode mode) {
  if (!call.header.on_device) return host_.issue(std::move(call), mode);
  const at::NoGradGuard no_grad;
  const auto& stream = stream_.of(host_.world(), call.tensors);
  host_.check_open();
  if (mode == Mode::work) return issue_on_stream(call, stream);
  Headers headers;
  if (host_.world().options.check_collectives || call.header.free_numel || !met_)
    headers = compare_now(call);
  move(call, headers);
  set_last(stream.mark_current());
  return {};
}

Work DeviceExecutor::issue_on_stream(const Call& call, const CommStream& stream) {
  Work compared;
  if (met_) compared = compare_later(call);
  else compare_now(call);
  const CommStream::Scope on_stream(stream);
  for (const auto& tensor : call.tensors) stream.keep(tensor);
  try {
    move(call, {});
  } catch (const BrokenWorldError&) {
    compared.wait();  // its error names the rank
    throw;
  }
  const auto end = std::make_shared<CommStream::Mark>(stream.mark());
  set_last(*end);
  return Work(std::make_shared<StreamWork>(stream, std::move(compared), end));
}

void DeviceExecutor::move(const Call& call, const Headers& headers) {
  try {
    call.body(host_.transport(), headers);
  } catch (...) {
    host_.failure().rethrow(call);
  }
}

Work DeviceExecutor::compare_later(const Call& call) {
  if (!host_.world().options.check_collectives) return {};
  Call comparison{call.header, [](Transport&, const Headers&) {}, {}, call.tag};
  return host_.queue().submit([host = &host_, comparison = std::move(comparison)] {
    try {
      host->execute(comparison);
    } catch (const std::exception& error) {
      // The data has been sent, and a rank that does something else does not receive it.
      if (!host->failure().ended()) host->failure().end(message_of(error), true);
      host->transport().abort_device();
      throw;
    }
  });
}

Headers DeviceExecutor::compare_now(const Call& call) {
  Headers headers;
  const auto keep = [&](Transport& control, const Headers& all) {
    headers = all.empty() ? control.exchange(call.header) : all;
    if (!met_) meet(control, call.tensors.front().device());
  };
  host_.issue({call.header, keep, {}, call.tag}, Mode::wait);
  met_ = true;
  return headers;
}

void DeviceExecutor::meet(Transport& control, const at::Device& device) {
  check_devices(control, device);
  check_order_of_sums(control);
  const auto& world = host_.world();
  liveness_ = std::make_unique<Liveness>(
      c10::make_intrusive<c10d::PrefixStore>("on_device/", world.store), world.rank, world.size, 1,
      Liveness::Limits{world.options.timeout, world.options.timeout},
      [this](const std::vector<int>& lost) { lose(lost); });
}

void DeviceExecutor::check_devices(Transport& control, const at::Device& device) const {
  const auto& world = host_.world();
  const auto& transport = host_.transport();
  auto all = at::zeros({world.size}, at::kLong);
  auto* const devices = reinterpret_cast<int64_t*>(data_of(all));
  devices[world.rank] = number_of_identity(transport.device_identity(device));
  control.all_gather(all, std::vector<int64_t>(world.size, 1));
  const auto same =
      ranks_of_one_device(std::vector<int64_t>(devices, devices + world.size), world.hosts);
  if (!same) return;
  const auto type = c10::DeviceTypeName(transport.device_type(), true);
  throw UsageError(fmt::format(
      "ProcessGroup: ranks {} and {} use the same {} device of their host, and {} needs one "
      "for each rank; expected another device for one of them (model.device: {} without a "
      "number), no more ranks on a host than it has devices, or another backend (auto), which "
      "copies through the host's memory (seen on rank {}, {})",
      same->first, same->second, type, transport.name(), type, world.rank, device.str()));
}

void DeviceExecutor::check_order_of_sums(Transport& control) const {
  const auto& world = host_.world();
  auto all = at::zeros({world.size}, at::kByte);
  auto* const fixed = reinterpret_cast<uint8_t*>(data_of(all));
  fixed[world.rank] = world.options.deterministic ? 1 : 0;
  control.all_gather(all, std::vector<int64_t>(world.size, 1));
  const auto other = std::find_if(fixed, fixed + world.size, [&](auto x) { return x != fixed[0]; });
  if (other == fixed + world.size) return;
  throw UsageError(fmt::format(
      "ProcessGroup: deterministic is {} on rank 0 and {} on rank {}; expected the same on every "
      "rank (seen on rank {})",
      fixed[0] != 0, *other != 0, other - fixed, world.rank));
}

void DeviceExecutor::lose(const std::vector<int>& lost) {
  // The store ends with the rank that serves it, perhaps after the last collective.
  if (lost.empty() && is_reached(last(), [] {})) return;
  const auto& world = host_.world();
  auto& transport = host_.transport();
  auto& failure = host_.failure();
  if (!failure.ended()) {
    const auto limit = world.options.timeout.count();
    const auto cause = lost.empty() ? fmt::format("the store has not answered for {} ms", limit)
                                    : fmt::format("{} {} not run for {} ms", rank_list(lost),
                                                  lost.size() == 1 ? "has" : "have", limit);
    failure.lose(
        fmt::format("ProcessGroup ({}): rank {} of {} gave up on the device's collectives: {}",
                    transport.name(), world.rank, world.size, cause),
        lost);
  }
  if (is_reached(last(), [&transport] { transport.abort_device(); })) return;
  // A thread of this process may wait for the device until the process ends.
  fmt::print(stderr, "{}; the device does not end its collectives, so this process ends\n",
             failure.text());
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

CommStream::Mark DeviceExecutor::last() {
  std::lock_guard lock(mutex_);
  return last_;
}

void DeviceExecutor::set_last(CommStream::Mark mark) {
  std::lock_guard lock(mutex_);
  last_ = std::move(mark);
}

void DeviceExecutor::drain() noexcept {
  const auto mark = last();
  if (!mark || host_.failure().over()) return;
  try {
    const auto give_up = std::chrono::steady_clock::now() + host_.world().options.timeout;
    while (!mark->query() && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } catch (...) {  // the device has an error, which the next wait for it reports
  }
}

}  // namespace

std::unique_ptr<Executor> make_device_executor(HostExecutor& host) {
  return std::make_unique<DeviceExecutor>(host);
}

}  // namespace tessera::comm
