#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/execution/group_stream.h"
#include "comm/execution/host_executor.h"
#include "comm/p2p/liveness.h"

namespace tessera::comm {

/// Collectives on tensors of an accelerator with a backend. Their bodies run on the calling thread.
/// The headers are compared in `host`, over the transport for CPU tensors, and the host waits for
/// no stream. CPU tensors go to `host`.
class DeviceExecutor : public Executor {
 public:
  /// `host` lives longer.
  explicit DeviceExecutor(HostExecutor& host) : host_(host) {}
  /// Mode::wait: on the current stream; compares the headers first. Mode::work: on the group's
  /// stream, behind what the current one has issued. The Work waits for the comparison, and makes
  /// the current stream wait for the data.
  Work issue(Call call, Mode mode) override;
  void drain() noexcept override;

 private:
  Work issue_on_stream(const Call& call, const CommStream& stream);
  void move(const Call& call, const Headers& headers);
  Work compare_later(const Call& call);
  /// Blocks until all ranks have issued a collective on the device, without check_collectives too.
  /// The first one needs it: a backend connects the ranks there and may wait for ever for a rank
  /// that has ended.
  Headers compare_now(const Call& call);
  /// Before the first collective on the device, on which all ranks have agreed.
  void meet(Transport& control, const at::Device& device);
  /// Throws UsageError on all ranks if two of a host have the same device.
  void check_devices(Transport& control, const at::Device& device) const;
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

}  // namespace tessera::comm
