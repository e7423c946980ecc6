#pragma once

#include "comm/base/comm_stream.h"
#include "comm/execution/group_stream.h"
#include "comm/execution/host_executor.h"

namespace tessera::comm {

/// Where the transport carries an accelerator's tensors through the host's memory and waits for the
/// device there: in a turn of `host`, as CPU tensors.
class StagedExecutor : public Executor {
 public:
  /// `host` lives longer.
  explicit StagedExecutor(HostExecutor& host) : host_(host) {}
  Work issue(Call call, Mode mode) override;

 private:
  HostExecutor& host_;
  GroupStream stream_;
};

}  // namespace tessera::comm
