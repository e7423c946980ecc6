#pragma once

#include "tessera/error.h"

#include <functional>
#include <string>

namespace tessera::testing {

/// The text of the UsageError that `call` throws.
inline std::string error_text(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace tessera::testing
