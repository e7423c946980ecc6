#pragma once

#include <memory>

#include "comm/execution/call.h"
#include "tessera/process_group.h"

namespace tessera::comm {

enum class Mode {
  wait,  ///< The call is complete when issue() returns.
  work,  ///< The returned Work tells when it is.
};

/// Runs the collectives of one group on this rank. A group chooses its executor when it is made.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual Work issue(Call call, Mode mode) = 0;
  /// Waits until a device has run the group's collectives: the other ranks need this rank's part.
  virtual void drain() noexcept {}
};

class HostExecutor;  // for collectives on CPU tensors alone

/// For a group of ProcessGroup::with_wire(). The headers are compared in the group `control`, in
/// the order in which this rank calls the collectives of both groups, and the data follow in
/// `data`. The arguments must live longer, here and below.
std::unique_ptr<Executor> make_compared_executor(HostExecutor& control, HostExecutor& data);
/// For tensors of an accelerator with a backend. The bodies of calls run on the calling thread. The
/// headers are compared in `host`, over the transport for CPU tensors, and the host waits for no
/// stream. Mode::wait: on the current stream, after the comparison. Mode::work: on the group's
/// stream, behind what the current one has issued; the Work waits for the comparison, and makes the
/// current stream wait for the data.
std::unique_ptr<Executor> make_device_executor(HostExecutor& host);
/// For a transport that carries an accelerator's tensors through the host's memory and waits for
/// the device. A collective takes a turn of `host`, as one on CPU tensors does.
std::unique_ptr<Executor> make_staged_executor(HostExecutor& host);

}  // namespace tessera::comm
