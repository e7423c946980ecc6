#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "comm/base/comm_stream.h"
#include "comm/base/transport.h"
#include "comm/base/world.h"
#include "comm/group/queue.h"
#include "comm/group/traffic.h"
#include "comm/p2p/heartbeats.h"
#include "tessera/detail/own_process.h"

namespace tessera {

/// The state that the copies of one ProcessGroup share.
class ProcessGroup::Impl {
 public:
  Impl();  // a group of one rank
  /// `traffic`: that of the group whose counters this one shares; null: of its own.
  Impl(comm::World world, std::unique_ptr<comm::Transport> transport,
       std::shared_ptr<comm::Traffic> traffic = nullptr);
  ~Impl();

  /// As std::make_shared. A forked child does not destroy the group: it has none of its threads,
  /// and the other ranks belong to the parent.
  template <class... Arguments>
  static std::shared_ptr<Impl> make(Arguments&&... arguments) {
    return {new Impl(std::forward<Arguments>(arguments)...), [](Impl* impl) {
              if (impl->process_.is_this()) delete impl;
            }};
  }

  /// Runs one collective: compares the ranks' headers, then runs `body` with all of them. The
  /// headers are empty when they were not compared (see ProcessGroupOptions::check_collectives).
  /// `tag` and those of the thread's TagScope are part of the header, and are used in messages.
  /// `tensors`: all that `body` reads or writes; they are on one device.
  using Body = std::function<void(comm::Transport&, const std::vector<comm::OpHeader>& headers)>;
  using Tensors = std::vector<at::Tensor>;
  void run(comm::OpHeader header, Body body, const std::string& tag = "",
           const Tensors& tensors = {});
  /// See ProcessGroup::fail(). Informs the ranks of this group and of its sub-groups, because each
  /// may wait in any of them.
  [[noreturn]] void fail(const std::string& message);
  void add_child(const std::shared_ptr<Impl>& child);
  /// The sub-groups, those of the sub-groups, and so on, as far as they are alive.
  std::vector<std::shared_ptr<Impl>> descendants();
  /// Reports to the launcher that all ranks of the group end with this error, which began on these.
  void report_agreed(const std::vector<int>& began, const std::string& text) const;
  Work submit(comm::OpHeader header, Body body, const std::string& tag, const Tensors& tensors);

  bool alone() const { return world.size == 1; }
  comm::Traffic& traffic() { return *traffic_; }
  void count(CollectiveStats CommStats::*kind, uint64_t sent, uint64_t received) {
    traffic_->count(kind, sent, received);
  }
  /// Another group of the same ranks with this one's counters. `prefix`: of its keys in the store.
  /// `control`: this group, if the other one's collectives are compared here.
  std::shared_ptr<Impl> duplicate(comm::World world, const char* prefix,
                                  std::shared_ptr<Impl> control = nullptr);

  comm::World world;
  std::unique_ptr<comm::Transport> transport;  // null in a group of one rank
  uint64_t splits = 0;
  std::atomic<bool> ended = false;  // failure() is set

 private:
  // With `control_`: the headers are compared there, in the order in which this rank calls the
  // collectives of both groups, and the data follow here.
  void run_compared(const comm::OpHeader& header, const Body& body, const std::string& tag);
  Work submit_compared(const comm::OpHeader& header, Body body, const std::string& tag);
  /// The operation of `control_` that compares one of these collectives and moves no data.
  struct Comparison {
    comm::OpHeader header;
    std::string tag;
    Body keep;  ///< Keeps the headers of all ranks.
  };
  Comparison comparison_of(const comm::OpHeader& header, const std::string& tag,
                           std::shared_ptr<std::vector<comm::OpHeader>> headers) const;

  void execute(comm::OpHeader header, const Body& body, const std::string& tag);
  /// As execute(), while this operation has the queue's turn.
  void execute_in_turn(const comm::OpHeader& header, const Body& body, const std::string& tag);
  /// Runs execute_in_turn() on this thread if it gets a turn, else on the queue's.
  void take_turn(const comm::OpHeader& header, const Body& body, const std::string& tag);
  // Collectives on tensors of an accelerator. `body` runs on this thread. The headers are compared
  // on the queue, over the transport for CPU tensors, and the host waits for no stream.
  /// On the current stream; compares the headers first.
  void run_on_device(const comm::OpHeader& header, const Body& body, const std::string& tag,
                     const Tensors& tensors);
  /// On the group's stream, behind what the current one has issued. The Work waits for the
  /// comparison, and makes the current stream wait for the data.
  Work submit_on_device(const comm::OpHeader& header, const Body& body, const std::string& tag,
                        const Tensors& tensors);
  // The same where the transport waits for the device: on this thread or the queue's, in a turn.
  void run_staged(const comm::OpHeader& header, const Body& body, const std::string& tag,
                  const Tensors& tensors);
  Work submit_staged(const comm::OpHeader& header, const Body& body, const std::string& tag,
                     const Tensors& tensors);
  void check_open();
  /// Throws UsageError in a forked child: it would take the parent's part in a collective.
  void check_process() const;
  comm::CommStream& stream_for(const Tensors& tensors);
  Work compare_later(const comm::OpHeader& header, const std::string& tag);
  /// Blocks until all ranks have issued a collective on the device, without check_collectives too.
  /// The first one needs it: a backend connects the ranks there and may wait for ever for a rank
  /// that has ended.
  std::vector<comm::OpHeader> compare_now(const comm::OpHeader& header, const std::string& tag);
  /// Before the first collective on the device, on which all ranks have agreed.
  void meet_on_device(comm::Transport& control);
  /// Throws UsageError on all ranks if two of a host have the same device.
  void check_devices(comm::Transport& control) const;
  /// These ranks do not run any more, so the device may wait for them, and the host for the device.
  /// Ends the group and the device's collectives, or else the process. None: the store is silent.
  void lose(const std::vector<int>& lost);
  comm::CommStream::Mark last_on_device();
  void set_last_on_device(comm::CommStream::Mark mark);
  [[noreturn]] void throw_ended();
  /// Waits until the device has run the group's collectives: the other ranks need this rank's part.
  void drain() noexcept;
  /// Adds the collective to the errors that `call` throws, and reports them to the launcher.
  void name_errors(const comm::OpHeader& header, const std::string& tag,
                   const std::function<void()>& call);
  std::vector<comm::OpHeader> compare(const comm::OpHeader& header, const std::string& tag);
  std::vector<std::string> exchange_tags(const std::string& mine);

  /// Starts informing this group's ranks of this rank's failure.
  Work announce(const std::string& message);
  Work end_locally(const std::string& message);

  std::string failure_of(const std::vector<comm::OpHeader>& headers, const std::string& mine);
  std::string failure();
  /// `shared`: the text was exchanged with all ranks. Nothing replaces it then.
  void set_failure(std::string text, bool shared);
  bool failure_is_shared();

  detail::OwnProcess process_;
  uint64_t sequence_ = 0;
  std::atomic<bool> closing_ = false;  // operations may fail because this rank leaves
  std::atomic<bool> broken_ = false;   // an operation threw BrokenWorldError
  std::mutex failure_mutex_;           // fail() can run while the queue runs operations
  std::string failure_;                // the message that ended the group
  bool shared_ = false;  // all ranks know the message: no further exchange will be answered
  std::shared_ptr<Impl> control_;  // of with_wire(); null: this group compares its collectives
  std::mutex children_mutex_;
  std::vector<std::weak_ptr<Impl>> children_;
  std::shared_ptr<comm::Traffic> traffic_;
  std::optional<comm::CommStream> stream_;  // made when first needed
  std::mutex device_mutex_;
  comm::CommStream::Mark last_on_device_;  // the end of the last collective
  bool met_on_device_ = false;             // all ranks have issued the first collective there
  std::exception_ptr lost_;                // under failure_mutex_
  std::unique_ptr<comm::Heartbeats> heartbeats_;  // of a group with a device
  comm::Queue queue_;
};

}  // namespace tessera
