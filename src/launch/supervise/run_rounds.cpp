// The rounds of several hosts whose launchers meet: each is an attempt on the hosts of the round.
#include <exception>

#include <poll.h>

#include "launch/environment.h"
#include "launch/rounds/meeting.h"
#include "launch/supervise/supervisor.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

using End = NodeDocument::End;

/// "rank 3 of 4", "ranks 0 to 2 of 4".
std::string own_ranks(const LaunchOptions& options) {
  const int first = global_rank(options, 0),
            last = global_rank(options, options.nproc_per_node - 1);
  return (first == last ? "rank " : "ranks " + std::to_string(first) + " to ") +
         std::to_string(last) + " of " + std::to_string(world_size(options));
}

std::string reason_of(const Cause& cause) {
  std::string end = describe(cause);
  if (cause.kind != Cause::Kind::elsewhere) return end;
  return "the failure began on " + list_ranks(cause.others) + ", and " + end;
}

/// Tells the other hosts the end of a round on this one.
void report_end(Meeting& meeting, const Outcome& outcome) {
  const auto& cause = outcome.cause;
  const bool requested = cause && cause->kind == Cause::Kind::request;
  if (outcome.asked || (outcome.interrupted && !outcome.ordered && !requested)) {
    meeting.end(End::stopped, "a signal to the launcher stopped the program", true, true);
  } else if (outcome.ordered) {
    meeting.end(End::followed, "an order stopped the program", false, false);
  } else if (requested) {
    meeting.end(cause->here ? End::stopped : End::followed, describe(*cause), cause->here, true);
  } else if (outcome.exit_code == 0) {
    meeting.end(End::done, "", false, false);
  } else if (!outcome.not_started.empty()) {
    meeting.end(End::failed, outcome.not_started, true, true);
  } else {
    meeting.end(End::failed, cause ? reason_of(*cause) : "a rank failed", cause && cause->known(),
                false);
  }
}

class Rounds {
 public:
  explicit Rounds(const Surroundings& around) : around_(around), meeting_(around.options) {}

  int run() {
    for (;;) {
      const auto order = wait_for_order();
      if (!order) return code_;
      if (order->kind == Order::Kind::over) {
        if (!order->text.empty()) say(order->text);
        return order->text.empty() || code_ != 0 ? code_ : 1;
      }
      run_round(*order);
      if (stopped_ && around_.options.node_rank != 0) return code_;
    }
  }

 private:
  /// The next order to start a round or to end; nullopt if a signal requests the end.
  std::optional<Order> wait_for_order() {
    std::string said;
    for (;;) {
      const Order order = meeting_.take();
      if (order.kind == Order::Kind::over || meeting_.place_in(order) >= 0) return order;
      if (order.kind == Order::Kind::wait && !order.text.empty() && order.text != said)
        say(said = order.text);
      (void)around_.console.flush(around_.signals.fd());
      pollfd polled[] = {{around_.signals.fd(), POLLIN, 0}, {meeting_.fd(), POLLIN, 0}};
      (void)poll(polled, 2, around_.console.pending() ? 1000 : -1);
      if (const int number = end_requested(around_.signals)) {
        say(signal_name(number) + ": no longer waiting for the other hosts");
        if (code_ == 0) code_ = 128 + number;
        return std::nullopt;
      }
    }
  }

  void run_round(const Order& order) {
    LaunchOptions options = around_.options;
    options.nnodes = static_cast<int>(order.nodes.size());
    options.node_rank = meeting_.place_in(order);
    options.ranks_of_nodes = order.ranks;
    say("round " + std::to_string(order.round) + ": " + order.text + "; node " +
        std::to_string(*around_.options.node_rank) + " has node rank " +
        std::to_string(*options.node_rank) + " and " + own_ranks(options));
    meeting_.begin(order.round);
    const Surroundings here{options,         around_.path,  around_.environment,
                            around_.console, around_.guard, around_.signals,
                            meeting_};
    const Outcome outcome = run_attempt(here, order.round, order.incarnations.front());
    if (!outcome.not_started.empty()) say(outcome.not_started);
    code_ = outcome.exit_code;
    stopped_ = outcome.asked;
    report_end(meeting_, outcome);
  }

  void say(const std::string& text) const {
    around_.console.say(around_.options.command + ": " + text);
  }

  const Surroundings& around_;
  Meeting meeting_;
  int code_ = 0;          ///< Of the last round.
  bool stopped_ = false;  ///< A signal to this launcher ended the last round.
};

}  // namespace

int run_rounds(const Surroundings& around) {
  try {
    return Rounds(around).run();
  } catch (const BrokenWorldError& error) {
    around.console.say(around.options.command + ": " + error.what());
    return 1;
  }
}

}  // namespace tessera::launch
