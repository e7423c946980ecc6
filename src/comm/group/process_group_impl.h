#pragma once

#include <atomic>
#include <mutex>

#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/group/queue.h"

namespace tessera {

/// The state that the copies of one ProcessGroup share.
class ProcessGroup::Impl {
 public:
  Impl();  // a world of one
  Impl(comm::World world, std::unique_ptr<comm::Transport> transport);
  ~Impl();

  /// One collective: compares headers, then runs `body`. `headers` (of all ranks) is empty in a
  /// world of one. `tag`: for messages.
  using Body = std::function<void(comm::Transport&, const std::vector<comm::OpHeader>& headers)>;
  void run(comm::OpHeader header, Body body, const std::string& tag = "");
  /// Tells the ranks of this group and of its sub-groups, in whichever they wait.
  [[noreturn]] void fail(const std::string& message);
  void add_child(const std::shared_ptr<Impl>& child);
  Work submit(comm::OpHeader header, Body body, const std::string& tag = "");

  bool alone() const { return world.size == 1; }
  void count(CollectiveStats CommStats::*kind, uint64_t sent, uint64_t received);
  CommStats snapshot();
  void reset();

  comm::World world;
  std::unique_ptr<comm::Transport> transport;  // null in a world of one
  uint64_t splits = 0;
  std::atomic<bool> ended = false;  // there is a failure()

 private:
  void execute(comm::OpHeader header, const Body& body, const std::string& tag);
  std::vector<comm::OpHeader> compare(const comm::OpHeader& header, const std::string& tag);
  std::vector<std::string> exchange_tags(const std::string& mine);

  /// Begins to tell this group's ranks.
  Work announce(const std::string& message);
  std::vector<std::shared_ptr<Impl>> descendants();

  std::string failure_of(const std::vector<comm::OpHeader>& headers, const std::string& mine);
  std::string failure();
  void set_failure(std::string text);

  uint64_t sequence_ = 0;
  std::mutex failure_mutex_;  // fail() is called while the queue works
  std::string failure_;       // what ended the group
  std::mutex children_mutex_;
  std::vector<std::weak_ptr<Impl>> children_;
  std::mutex stats_mutex_;
  CommStats stats_;
  comm::Queue queue_;
};

}  // namespace tessera
