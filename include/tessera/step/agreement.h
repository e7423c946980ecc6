#pragma once

#include <functional>
#include <string>

#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera {

/// Thrown by agree(), on every rank with the same text: one of them may say it for all.
class AgreedError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Runs `prepare` on this rank and waits for the others. When it threw anywhere, throws AgreedError
/// on every rank with one text: what was wrong, and on which ranks when not on all. `prepare` makes
/// no collectives. A collective.
void agree(const ProcessGroup& group, const std::function<void()>& prepare);

/// What an exception says, without libtorch's backtrace.
std::string message_of(const std::exception& error);

}  // namespace tessera
