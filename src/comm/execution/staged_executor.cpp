#include <utility>

#include "comm/execution/group_stream.h"
#include "comm/execution/host_executor.h"

namespace tessera::comm {
namespace {

class StagedExecutor : public Executor {
 public:
  explicit StagedExecutor(HostExecutor& host) : host_(host) {}
  Work issue(Call call, Mode mode) override;

 private:
  HostExecutor& host_;
  GroupStream stream_;
};

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
  return Work(std::make_shared<StreamWork>(stream, std::move(carried), std::move(end)));
}

}  // namespace

std::unique_ptr<Executor> make_staged_executor(HostExecutor& host) {
  return std::make_unique<StagedExecutor>(host);
}

}  // namespace tessera::comm
