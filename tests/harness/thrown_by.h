#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

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

/// Every rank of run_ranks_catching() has thrown a UsageError with `text` in its message.
inline void expect_usage_errors(const std::vector<std::exception_ptr>& errors,
                                const std::string& text) {
  for (const auto& error : errors) {
    const auto message = thrown_by([&] {
      if (error) std::rethrow_exception(error);
    });
    EXPECT_NE(message.find(text), std::string::npos) << message << "\nhas not: " << text;
  }
}

}  // namespace tessera::testing
