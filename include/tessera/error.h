#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {

/// Base class of all errors that the library throws: UsageError and BrokenWorldError. See
/// docs/errors.md.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake: a wrong option, file, shape or order of calls. The message names the
/// component, the parameter, file or option, the rank if ranks can differ, the value, and the
/// expected value. If other ranks would otherwise wait for this one, they throw too. The object
/// that threw is unchanged by the call.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A peer died, left, or did not arrive in time. The process group cannot be used any more: end the
/// program and start again from the last checkpoint.
class BrokenWorldError : public Error {
 public:
  /// `ranks`: the ranks of the group that caused the failure, ascending; empty when unknown.
  BrokenWorldError(const std::string& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

}  // namespace tessera
