#pragma once

#include "comm/execution/host_executor.h"

namespace tessera::comm {

/// Of a group of ProcessGroup::with_wire(). The headers are compared in the group `control`, in the
/// order in which this rank calls the collectives of both groups, and the data follow in `data`.
class ComparedExecutor : public Executor {
 public:
  /// Both live longer.
  ComparedExecutor(HostExecutor& control, HostExecutor& data) : control_(control), data_(data) {}
  Work issue(Call call, Mode mode) override;

 private:
  HostExecutor &control_, &data_;
};

}  // namespace tessera::comm
