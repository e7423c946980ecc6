#pragma once

#include <stdexcept>
#include <string>
#include <vector>

namespace tessera {

/// Base of everything the library throws. Two classes follow, and only two: see docs/errors.md.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller's mistake: a wrong option, file, shape or order of calls. The message names the
/// component, the parameter, file or option, the rank where it matters, the value, and what was
/// expected. Where other ranks would wait, they throw too. The object that threw is as it was
/// before the call.
class UsageError : public Error {
 public:
  using Error::Error;
};

/// A broken world: a peer died, left, or did not arrive in time. The process group cannot be used
/// any more; the way on is to end and to start again from the last checkpoint.
class BrokenWorldError : public Error {
 public:
  /// `ranks`: the ranks (of the group) held responsible, ascending; empty when unknown.
  BrokenWorldError(const std::string& message, std::vector<int> ranks)
      : Error(message), ranks_(std::move(ranks)) {}

  const std::vector<int>& ranks() const noexcept { return ranks_; }

 private:
  std::vector<int> ranks_;
};

}  // namespace tessera
