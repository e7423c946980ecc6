#pragma once

#include "tessera/error.h"

#include <functional>
#include <string>

namespace tessera::testing {

/// The text of the UsageError that the call throws.
inline std::string thrown_by(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace tessera::testing
