// Collectives on tensors of an accelerator.
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "comm/group/process_group_impl.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

using comm::CommStream;
using comm::OpHeader;
using comm::Transport;
using Headers = std::vector<OpHeader>;

namespace {

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

void ProcessGroup::Impl::run_on_device(const OpHeader& header, const Body& body,
                                       const std::string& tag, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto& stream = stream_for(tensors);
  check_open();
  Headers headers;
  if (world.options.check_collectives || header.free_numel)
    take_turn(
        header, [&](Transport&, const Headers& all) { headers = all; }, tag);
  name_errors(header, tag, [&] { body(*transport, headers); });
  last_on_device_ = stream.mark_current();
}

Work ProcessGroup::Impl::submit_on_device(const OpHeader& header, const Body& body,
                                          const std::string& tag, const Tensors& tensors) {
  const at::NoGradGuard no_grad;
  const auto& stream = stream_for(tensors);
  check_open();
  auto compared = compare_later(header, tag);
  const CommStream::Scope on_stream(stream);
  for (const auto& tensor : tensors) stream.keep(tensor);
  name_errors(header, tag, [&] { body(*transport, Headers()); });
  auto work = std::make_shared<DeviceWork>(stream, std::move(compared));
  last_on_device_ = stream.mark();
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
  if (!last_on_device_ || ended || broken_) return;
  try {
    const auto give_up = std::chrono::steady_clock::now() + world.options.timeout;
    while (!last_on_device_->query() && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } catch (...) {  // the device has an error, which the next wait for it reports
  }
}

}  // namespace tessera
