#pragma once

#include <functional>
#include <string>

#include "tessera/error.h"
#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Thrown by agree() on every rank with the same text, so one rank should print it.
class AgreedError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Runs `prepare` on this rank and waits for the other ranks. If it threw on any rank, throws
/// AgreedError on every rank with the same text: the messages and, for each one that not all ranks
/// gave, its ranks. `prepare` must not call collectives. Collective; blocks.
void agree(const ProcessGroup& group, const std::function<void()>& prepare);

/// The message of an exception, without libtorch's backtrace. If memory ran out, it begins with the
/// limit of this process (RLIMIT_AS, `ulimit -v`) and its peak. Local.
std::string message_of(const std::exception& error);

}  // namespace tessera
#pragma GCC visibility pop
