// Collectives on tensors of an accelerator.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/device/backends.h"
#include "comm/failures/process_failures.h"
#include "comm/group/process_group_impl.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

using comm::CommStream;
using comm::OpHeader;
using comm::Transport;
using Headers = std::vector<OpHeader>;

namespace {

/// A backend has so long to end a collective. With the time-out and a beat it is at most the
/// time-out and two seconds.
constexpr std::chrono::milliseconds kUntilFreed{1500}, kPoll{10};

/// A collective on the group's stream, and the comparison of its headers.
class DeviceWork : public Work::State {
 public:
  DeviceWork(const CommStream& stream, Work compared)
      : stream_(stream), end_(stream.mark()), compared_(std::move(compared)) {}
  void wait() override {
    compared_.wait();
    stream_.join(end_);
  }
  bool done() override { return compared_.done() && end_->query(); }

 private:
  CommStream stream_;
  CommStream::Mark end_;
  Work compared_;
};

}  // namespace

CommStream& ProcessGroup::Impl::stream_for(const Tensors& tensors) {
  for (const auto& tensor : tensors) {
    if (!stream_) stream_.emplace(tensor.device());
    if (tensor.device() == stream_->device()) continue;
    throw UsageError(fmt::format(
        "ProcessGroup: rank {} of {}: the tensor is on {}, and earlier ones of this group were on "
        "{}; expected one device for each rank",
        world.rank, world.size, tensor.device().str(), stream_->device().str()));
  }
  return *stream_;
}

Work ProcessGroup::Impl::compare_later(const OpHeader& header, const std::string& tag) {
  if (!world.options.check_collectives) return {};
  return queue_.submit([this, header, tag] {
    try {
      execute_in_turn(
          header, [](Transport&, const Headers&) {}, tag);
    } catch (const std::exception& error) {
      // The data is on its way, and a rank that does something else does not answer it.
      if (!ended) set_failure(message_of(error), true);
      transport->abort_device();
      throw;
    }
  });
}

Headers ProcessGroup::Impl::compare_now(const OpHeader& header, const std::string& tag) {
  Headers headers;
  take_turn(
      header,
      [&](Transport& control, const Headers& all) {
        headers = all.empty() ? control.exchange(header) : all;
        if (!met_on_device_) meet_on_device(control);
      },
      tag);
  met_on_device_ = true;
  return headers;
}

void ProcessGroup::Impl::meet_on_device(Transport& control) {
  check_devices(control);
  heartbeats_ = std::make_unique<comm::Heartbeats>(
      c10::make_intrusive<c10d::PrefixStore>("on_device/", world.store), world.rank, world.size, 1,
      comm::Heartbeats::Limits{world.options.timeout, world.options.timeout},
      [this](const std::vector<int>& lost) { lose(lost); });
}

void ProcessGroup::Impl::check_devices(Transport& control) const {
  auto all = at::zeros({world.size}, at::kLong);
  auto* const devices = all.data_ptr<int64_t>();
  devices[world.rank] = comm::number_of_identity(transport->device_identity(stream_->device()));
  control.all_gather(all, std::vector<int64_t>(world.size, 1));
  const auto same =
      comm::ranks_of_one_device(std::vector<int64_t>(devices, devices + world.size), world.hosts);
  if (!same) return;
  const auto type = c10::DeviceTypeName(transport->device_type(), true);
  throw UsageError(fmt::format(
      "ProcessGroup: ranks {} and {} use the same {} device of their host, and {} needs one "
      "for each rank; expected another device for one of them (model.device: {} without a "
      "number), no more ranks on a host than it has devices, or another backend (auto), which "
      "copies through the host's memory (seen on rank {}, {})",
      same->first, same->second, type, transport->name(), type, world.rank,
      stream_->device().str()));
}

namespace {

/// Calls `first` and then waits until the device has reached `mark`, for at most kUntilFreed.
/// False: it has not, or a call of the device's library blocks, so another thread makes them.
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

}  // namespace

void ProcessGroup::Impl::lose(const std::vector<int>& lost) {
  // The store ends with the rank that serves it, perhaps after the last collective.
  if (lost.empty() && is_reached(last_on_device(), [] {})) return;
  if (!ended) {
    const auto limit = world.options.timeout.count();
    const auto cause = lost.empty() ? fmt::format("the store has not answered for {} ms", limit)
                                    : fmt::format("{} {} not run for {} ms", comm::rank_list(lost),
                                                  lost.size() == 1 ? "has" : "have", limit);
    const auto text =
        fmt::format("ProcessGroup ({}): rank {} of {} gave up on the device's collectives: {}",
                    transport->name(), world.rank, world.size, cause);
    const auto blamed = world.in_world(lost);
    {
      std::lock_guard lock(failure_mutex_);
      lost_ = std::make_exception_ptr(BrokenWorldError(text, lost));
    }
    broken_ = true;
    set_failure(text, true);
    if (!closing_) {
      if (world.failures) world.failures->tell_others(world, blamed);
      detail::report_broken(blamed, text);
    }
  }
  if (is_reached(last_on_device(), [this] { transport->abort_device(); })) return;
  // A thread of this process may wait for the device, and only the end of the process ends that.
  fmt::print(stderr, "{}; the device does not end its collectives, so this process ends\n",
             failure());
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

CommStream::Mark ProcessGroup::Impl::last_on_device() {
  std::lock_guard lock(device_mutex_);
  return last_on_device_;
}

void ProcessGroup::Impl::set_last_on_device(CommStream::Mark mark) {
  std::lock_guard lock(device_mutex_);
  last_on_device_ = std::move(mark);
}

void ProcessGroup::Impl::run_on_device(const OpHeader& header, const Body& body,
                                       const std::string& tag, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto& stream = stream_for(tensors);
  check_open();
  Headers headers;
  if (world.options.check_collectives || header.free_numel || !met_on_device_)
    headers = compare_now(header, tag);
  name_errors(header, tag, [&] { body(*transport, headers); });
  set_last_on_device(stream.mark_current());
}

Work ProcessGroup::Impl::submit_on_device(const OpHeader& header, const Body& body,
                                          const std::string& tag, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto& stream = stream_for(tensors);
  check_open();
  Work compared;
  if (met_on_device_) compared = compare_later(header, tag);
  else compare_now(header, tag);
  const CommStream::Scope on_stream(stream);
  for (const auto& tensor : tensors) stream.keep(tensor);
  try {
    name_errors(header, tag, [&] { body(*transport, Headers()); });
  } catch (const BrokenWorldError&) {
    compared.wait();  // its error has the rank
    throw;
  }
  auto work = std::make_shared<DeviceWork>(stream, std::move(compared));
  set_last_on_device(stream.mark());
  return Work(std::move(work));
}

namespace {

/// A collective that a thread of the host carries out, and then the stream's part of it.
class StagedWork : public Work::State {
 public:
  StagedWork(const CommStream& stream, Work carried, std::shared_ptr<CommStream::Mark> end)
      : stream_(stream), carried_(std::move(carried)), end_(std::move(end)) {}
  void wait() override {
    carried_.wait();
    stream_.join(*end_);
  }
  bool done() override { return carried_.done() && (!*end_ || (*end_)->query()); }

 private:
  CommStream stream_;
  Work carried_;
  std::shared_ptr<CommStream::Mark> end_;  // null after an error
};

}  // namespace

void ProcessGroup::Impl::run_staged(const OpHeader& header, const Body& body,
                                    const std::string& tag, const Tensors& tensors) {
  const auto device = stream_for(tensors).device();
  const auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  const auto there = [&](Transport& carrier, const Headers& headers) {
    const c10::StreamGuard same(current);
    body(carrier, headers);
  };
  take_turn(header, there, tag);
}

Work ProcessGroup::Impl::submit_staged(const OpHeader& header, const Body& body,
                                       const std::string& tag, const Tensors& tensors) {
  const auto& stream = stream_for(tensors);
  for (const auto& tensor : tensors) stream.keep(tensor);
  auto end = std::make_shared<CommStream::Mark>();
  auto carried =
      queue_.submit([this, header, body, tag, end, stream, ready = stream.mark_current()] {
        const CommStream::Scope on_stream(stream, ready);
        execute_in_turn(header, body, tag);
        *end = stream.mark();
      });
  return Work(std::make_shared<StagedWork>(stream, std::move(carried), std::move(end)));
}

void ProcessGroup::Impl::drain() noexcept {
  const auto last = last_on_device();
  if (!last || ended || broken_) return;
  try {
    const auto give_up = std::chrono::steady_clock::now() + world.options.timeout;
    while (!last->query() && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } catch (...) {  // the device has an error, which the next wait for it reports
  }
}

}  // namespace tessera
