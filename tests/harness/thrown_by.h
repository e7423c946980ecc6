#pragma once

#include <functional>
#include <string>

#include "tessera/error.h"

namespace tessera::testing {

/// The message of the UsageError that `call` throws; "no error" if it does not throw one.
inline std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace tessera::testing
