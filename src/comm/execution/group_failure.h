#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <string>
#include <vector>

#include "comm/base/world.h"
#include "comm/execution/call.h"
#include "tessera/error.h"

namespace tessera::comm {

/// The group had ended before the operation began.
class GroupEnded : public UsageError {
 public:
  using UsageError::UsageError;
};

/// The end of one group on this rank, and its reason. Thread-safe.
class GroupFailure {
 public:
  /// `world` lives longer.
  explicit GroupFailure(const World& world) : world_(world) {}

  /// This rank leaves the group. Later failures follow from that and are not reported.
  void leave() { leaving_ = true; }
  bool leaving() const { return leaving_; }
  /// Ends the group. `shared`: all ranks know the text, so nothing replaces it, and no further
  /// exchange will be answered.
  void end(std::string text, bool shared);
  /// Ends the group because these ranks do not run any more, and reports that.
  void lose(const std::string& text, const std::vector<int>& lost);
  bool ended() const { return ended_; }
  /// The group has ended, or one of its collectives has failed.
  bool over() const { return ended_ || broken_; }
  bool shared() const;
  std::string text() const;
  void throw_if_ended() const;

  /// For a handler of an exception that `call` has thrown. Adds the call to its text, reports it to
  /// the launcher and to other groups of this process, and throws it.
  [[noreturn]] void rethrow(const Call& call);
  /// The messages of the ranks that have failed, gathered on all ranks; "" if none has. `mine` is
  /// this rank's message, "" if it has not failed.
  std::string gather(Transport& transport, const Headers& headers, const std::string& mine) const;

 private:
  void report_broken(const std::vector<int>& members, const std::string& text);

  const World& world_;
  std::atomic<bool> leaving_ = false, ended_ = false, broken_ = false;
  mutable std::mutex mutex_;  // guards what follows
  std::string text_;
  bool shared_ = false;
  std::exception_ptr lost_;
};

}  // namespace tessera::comm
