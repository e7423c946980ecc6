#include "comm/execution/staged_executor.h"

#include <utility>

namespace tessera::comm {
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

Work StagedExecutor::issue(Call call, Mode mode) {
  if (!call.header.on_device) return host_.issue(std::move(call), mode);
  const auto& stream = stream_.of(host_.world(), call.tensors);
  if (mode == Mode::wait) {
    const auto device = stream.device();
    const auto current = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    call.body = [current, body = std::move(call.body)](Transport& carrier, const Headers& headers) {
      const c10::StreamGuard same(current);
      body(carrier, headers);
    };
    return host_.issue(std::move(call), mode);
  }
  for (const auto& tensor : call.tensors) stream.keep(tensor);
  auto end = std::make_shared<CommStream::Mark>();
  auto carried = host_.queue().submit(
      [host = &host_, call = std::move(call), end, stream, ready = stream.mark_current()] {
        const CommStream::Scope on_stream(stream, ready);
        host->execute(call);
        *end = stream.mark();
      });
  return Work(std::make_shared<StagedWork>(stream, std::move(carried), std::move(end)));
}

}  // namespace tessera::comm
