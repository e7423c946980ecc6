#include "comm/group/process_group_impl.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <xxhash.h>

#include "comm/failures/process_failures.h"
#include "comm/group/checked_transport.h"
#include "comm/group/make_transport.h"
#include "comm/group/running_scope.h"
#include "comm/group/tag_scope.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/step/agreement.h"

namespace tessera {

using comm::Op;
using comm::OpHeader;
using comm::Transport;
using Headers = std::vector<OpHeader>;

namespace {

/// The group had ended before the operation began.
class GroupEnded : public UsageError {
 public:
  using UsageError::UsageError;
};

}  // namespace

ProcessGroup::Impl::Impl() : Impl(comm::World(), nullptr) { world.world_ranks = {0}; }

ProcessGroup::Impl::Impl(comm::World w, std::unique_ptr<Transport> t,
                         std::shared_ptr<comm::Traffic> traffic)
    : world(std::move(w)),
      transport(std::move(t)),
      traffic_(traffic ? std::move(traffic) : std::make_shared<comm::Traffic>()),
      queue_(traffic_->clock()) {
  if (world.options.check_results) {
    if (transport->device_type() != at::kCPU) {
      throw UsageError(
          fmt::format("ProcessGroup: check_results is true with backend {}; expected "
                      "false, because it verifies CPU tensors only",
                      transport->name()));
    }
    transport = comm::make_checked_transport(std::move(transport), world);
  }
  if (world.failures) world.failures->add(world);
}

ProcessGroup::Impl::~Impl() {
  closing_ = true;
  drain();
  heartbeats_.reset();
  if (transport) transport->abort();
  queue_.stop();
  if (world.failures) world.failures->remove(world);
}

void ProcessGroup::Impl::report_agreed(const std::vector<int>& began,
                                       const std::string& text) const {
  detail::report_agreed(world.in_world(began), text);
}

std::string ProcessGroup::Impl::failure() {
  std::lock_guard lock(failure_mutex_);
  return failure_;
}

void ProcessGroup::Impl::set_failure(std::string text, bool shared) {
  {
    std::lock_guard lock(failure_mutex_);
    if (!shared_) failure_ = std::move(text);
    shared_ = shared_ || shared;
  }
  ended = true;
}

bool ProcessGroup::Impl::failure_is_shared() {
  std::lock_guard lock(failure_mutex_);
  return shared_;
}

/// Returns the messages of the ranks that called fail(), gathered on all ranks. `mine` is this
/// rank's message; empty if it did not call fail(). Returns "" if no rank did.
std::string ProcessGroup::Impl::failure_of(const Headers& headers, const std::string& mine) {
  std::vector<int64_t> counts;
  int64_t total = 0, before = 0;
  for (int r = 0; r < world.size; ++r) {
    counts.push_back(headers[r].op == Op::fail ? headers[r].numel : 0);
    if (r < world.rank) before += counts.back();
    total += counts.back();
  }
  if (total == 0) return "";
  auto text = at::empty({total}, at::TensorOptions().dtype(at::kByte));
  auto* data = static_cast<char*>(text.data_ptr());
  if (!mine.empty()) std::memcpy(data + before, mine.data(), mine.size());
  transport->all_gather(text, counts);
  std::string lines;
  std::vector<int> began;
  for (int r = 0; r < world.size; data += counts[r++]) {
    if (counts[r] == 0) continue;
    lines += (lines.empty() ? "" : "\n") + std::string(data, counts[r]);
    began.push_back(r);
  }
  report_agreed(began, lines);
  return lines;
}

Work ProcessGroup::Impl::announce(const std::string& message) {
  set_failure(message, alone());
  if (alone()) return {};
  OpHeader header;
  header.op = Op::fail;
  header.numel = static_cast<int64_t>(message.size());
  header.free_numel = 1;
  // Queued behind earlier operations, because the other ranks count on these too. Another rank may
  // have failed meanwhile: an earlier operation has then received its message, and no rank would
  // answer this one.
  return queue_.submit([this, header, message]() mutable {
    if (failure_is_shared()) return;
    try {
      queue_.throw_unseen_error();  // the other ranks have left with this error
    } catch (const GroupEnded&) {   // an operation that was queued before this one
    }
    header.sequence = ++sequence_;
    set_failure(failure_of(transport->exchange(header), message), true);
  });
}

/// Ends a group whose `control_` tells the other ranks, when this rank has done its part of what
/// all have begun.
Work ProcessGroup::Impl::end_locally(const std::string& message) {
  return queue_.submit([this, message] { set_failure(message, false); });
}

void ProcessGroup::Impl::add_child(const std::shared_ptr<Impl>& child) {
  std::lock_guard lock(children_mutex_);
  children_.push_back(child);
}

std::shared_ptr<ProcessGroup::Impl> ProcessGroup::Impl::duplicate(comm::World w, const char* prefix,
                                                                  std::shared_ptr<Impl> control) {
  w.start_store = comm::store_of_start(world);
  w.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("{}{}/", prefix, ++splits), world.store);
  auto made = comm::make_transport(w);
  auto child = make(std::move(w), std::move(made), traffic_);
  child->control_ = control && control->control_ ? control->control_ : std::move(control);
  add_child(child);
  return child;
}

std::vector<std::shared_ptr<ProcessGroup::Impl>> ProcessGroup::Impl::descendants() {
  std::vector<std::shared_ptr<Impl>> result;
  std::lock_guard lock(children_mutex_);
  for (const auto& known : children_) {
    if (const auto child = known.lock()) {
      result.push_back(child);
      for (const auto& further : child->descendants()) result.push_back(further);
    }
  }
  return result;
}

void ProcessGroup::Impl::fail(const std::string& message) {
  check_process();
  if (control_) control_->fail(message);
  const std::string text = message.empty() ? "failed" : message;
  if (!failure_is_shared()) report_agreed({world.rank}, text);
  std::vector<Work> announced;
  // Collectives that all ranks have begun, in groups that are compared elsewhere.
  std::vector<Work> owed;
  // A sub-group has ended: a rank that failed there may not answer here any more.
  bool informed = false;
  const auto below = descendants();
  for (const auto& group : below) {
    if (group->ended) informed = true;
    else if (group->control_) owed.push_back(group->end_locally(text));
    else announced.push_back(group->announce(text));
  }
  Work own = announce(text);
  if (below.empty()) {
    own.wait();
  } else {
    // Each of the other ranks waits in one of these groups, not necessarily all in the same one.
    // In the remaining groups no rank answers.
    announced.push_back(own);
    constexpr std::chrono::milliseconds kOtherGroups{500}, kPoll{2};
    const auto give_up = std::chrono::steady_clock::now() + world.options.timeout;
    std::optional<std::chrono::steady_clock::time_point> first;
    while (true) {
      const auto now = std::chrono::steady_clock::now();
      const auto is_done = [](const Work& work) { return work.done(); };
      const auto done = std::count_if(announced.begin(), announced.end(), is_done);
      const bool all_done = done == static_cast<int64_t>(announced.size()) &&
                            std::all_of(owed.begin(), owed.end(), is_done);
      if ((done > 0 || informed) && !first) first = now;
      if (all_done || now > give_up || (first && now > *first + kOtherGroups)) break;
      std::this_thread::sleep_for(kPoll);
    }
    try {
      if (!own.done()) throw UsageError(text);
      own.wait();
    } catch (const Error&) {
      throw UsageError(text);  // ranks that were informed in a sub-group have left already
    }
  }
  if (failure_is_shared()) throw AgreedError(failure());
  throw UsageError(failure());
}

/// When ranks disagree about a collective, all of them know it and exchange their tags.
std::vector<std::string> ProcessGroup::Impl::exchange_tags(const std::string& mine) {
  constexpr int64_t kLength = 96;
  auto text = at::zeros({kLength * world.size}, at::TensorOptions().dtype(at::kByte));
  auto* data = static_cast<char*>(text.data_ptr());
  std::memcpy(data + kLength * world.rank, mine.data(), std::min<size_t>(mine.size(), kLength - 1));
  transport->all_gather(text, std::vector<int64_t>(world.size, kLength));
  std::vector<std::string> result;
  for (int r = 0; r < world.size; ++r) result.emplace_back(data + kLength * r);
  return result;
}

Headers ProcessGroup::Impl::compare(const OpHeader& header, const std::string& tag) {
  auto headers = transport->exchange(header);
  if (const auto text = failure_of(headers, ""); !text.empty()) {
    set_failure(text, true);
    throw AgreedError(text);
  }
  const auto differs = [](const OpHeader& a, const OpHeader& b) {
    return a.op != b.op || a.sequence != b.sequence || a.dtype != b.dtype || a.root != b.root ||
           a.detail != b.detail || a.on_device != b.on_device ||
           (a.numel != b.numel && !(a.free_numel && b.free_numel));
  };
  for (int r = 1; r < world.size; ++r) {
    if (!differs(headers[0], headers[r])) continue;
    const auto tags = exchange_tags(tag);
    const auto began = detail::minority(
        world.size, [&](int a, int b) { return !differs(headers[a], headers[b]); });
    const auto call = [&](int rank) {
      return comm::describe(headers[rank]) +
             (tags[rank].empty() ? "" : fmt::format(" ({})", tags[rank]));
    };
    auto message = fmt::format(
        "ProcessGroup: the ranks disagree about a collective: rank 0 calls {}, rank {} calls {}",
        call(0), r, call(r));
    if (tags[0] == tags[r] && headers[0].op == headers[r].op &&
        headers[0].numel == headers[r].numel && headers[0].dtype == headers[r].dtype) {
      message += " (with other counts per rank)";
    }
    message += fmt::format("; {} (seen on rank {})",
                           header.on_device && !transport->waits_for_device()
                               ? "the device may have moved data"
                               : "no data was moved",
                           world.rank);
    report_agreed(began, message);
    throw UsageError(message);
  }
  return headers;
}

namespace {

/// Adds the collective's number and purpose to the text of an error. A transport does not know the
/// purpose, and the number only if headers were exchanged.
std::string with_call(std::string text, const OpHeader& header, const std::string& tag) {
  const auto call = comm::describe(header);
  if (text.find(call) == std::string::npos) text += "; the collective is " + call;
  return tag.empty() ? text : text + "; its purpose: " + tag;
}

}  // namespace

void ProcessGroup::Impl::name_errors(const OpHeader& header, const std::string& tag,
                                     const std::function<void()>& call) {
  try {
    call();
  } catch (const BrokenWorldError& error) {
    broken_ = true;
    const auto text = with_call(error.what(), header, tag);
    if (!closing_) {
      const auto blamed = world.in_world(error.ranks());
      if (world.failures) world.failures->tell_others(world, blamed);
      detail::report_broken(blamed, text);
    }
    throw BrokenWorldError(text, error.ranks());
  } catch (const comm::WrongResult& error) {
    throw AgreedError("ProcessGroup: " + with_call(error.what(), header, tag));
  }
}

void ProcessGroup::Impl::execute(OpHeader header, const Body& body, const std::string& tag) {
  at::NoGradGuard no_grad;
  if (ended) throw_ended();
  header.sequence = ++sequence_;
  comm::RunningScope running(world, *transport, header, tag);
  name_errors(header, tag, [&] {
    Headers headers;
    if (control_) {
      running.begun_by_all();
    } else if (world.options.check_collectives || header.free_numel) {
      headers = compare(header, tag);
      running.begun_by_all();
    }
    body(*transport, headers);
  });
  // Barriers may be a part of ending after an error.
  if (header.op == Op::barrier) return;
  detail::withdraw_report();
  if (world.failures) world.failures->withdraw(world);
}

void ProcessGroup::Impl::check_open() {
  queue_.throw_unseen_error();
  if (ended) throw_ended();
}

void ProcessGroup::Impl::check_process() const {
  if (process_.is_this() || alone()) return;
  throw UsageError(fmt::format(
      "ProcessGroup: rank {}: process {} uses the group of process {}, from which it was "
      "forked; expected collectives in that process alone",
      world.rank, ::getpid(), process_.pid()));
}

void ProcessGroup::Impl::throw_ended() {
  std::exception_ptr lost;
  {
    std::lock_guard lock(failure_mutex_);
    lost = lost_;
  }
  if (lost) std::rethrow_exception(lost);
  throw GroupEnded("ProcessGroup: the group has ended: " + failure());
}

void ProcessGroup::Impl::execute_in_turn(const OpHeader& header, const Body& body,
                                         const std::string& tag) {
  queue_.throw_unseen_error();
  execute(header, body, tag);
}

namespace {

thread_local std::string tag_of_scope;

/// `tag` within the thread's TagScope, which becomes part of `header`.
std::string apply_tag(OpHeader& header, const std::string& tag) {
  auto whole = tag_of_scope + tag;
  if (!whole.empty()) header.detail ^= XXH64(whole.data(), whole.size(), 1);
  return whole;
}

}  // namespace

comm::TagScope::TagScope(std::string tag) : before_(std::exchange(tag_of_scope, std::move(tag))) {}
comm::TagScope::~TagScope() { tag_of_scope = std::move(before_); }

void ProcessGroup::Impl::take_turn(const OpHeader& header, const Body& body,
                                   const std::string& tag) {
  if (const auto turn = queue_.try_turn()) return execute_in_turn(header, body, tag);
  queue_.submit([&] { execute_in_turn(header, body, tag); }).wait();
}

void ProcessGroup::Impl::run(OpHeader header, Body body, const std::string& own_tag,
                             const Tensors& tensors) {
  check_process();
  const auto tag = apply_tag(header, own_tag);
  if (header.on_device && transport->waits_for_device()) run_staged(header, body, tag, tensors);
  else if (header.on_device) run_on_device(header, body, tag, tensors);
  else if (control_) run_compared(header, body, tag);
  else take_turn(header, body, tag);
}

Work ProcessGroup::Impl::submit(OpHeader header, Body body, const std::string& own_tag,
                                const Tensors& tensors) {
  check_process();
  const auto tag = apply_tag(header, own_tag);
  if (header.on_device && transport->waits_for_device())
    return submit_staged(header, body, tag, tensors);
  if (header.on_device) return submit_on_device(header, body, tag, tensors);
  if (control_) return submit_compared(header, std::move(body), tag);
  return queue_.submit(
      [this, header, body = std::move(body), tag] { execute_in_turn(header, body, tag); });
}

namespace {

/// A collective that is compared in another group than the one that moves its data. An error of the
/// comparison belongs to that group: its next collective throws it, unless wait() has done so.
class ComparedWork : public Work::State {
 public:
  ComparedWork(std::shared_ptr<Work::State> compared, std::shared_ptr<Work::State> data)
      : compared_(std::move(compared)), data_(std::move(data)) {}
  void wait() override {
    data_->wait();
    compared_->wait();
  }
  bool done() override { return data_->done(); }

 private:
  std::shared_ptr<Work::State> compared_, data_;
};

}  // namespace

ProcessGroup::Impl::Comparison ProcessGroup::Impl::comparison_of(
    const OpHeader& header, const std::string& tag, std::shared_ptr<Headers> headers) const {
  const auto format = "as " + to_string(world.wire);
  Comparison result{header, tag.empty() ? format : tag + ", " + format, {}};
  result.header.detail ^= XXH64(format.data(), format.size(), 2);
  result.keep = [headers = std::move(headers)](Transport&, const Headers& all) { *headers = all; };
  return result;
}

void ProcessGroup::Impl::run_compared(const OpHeader& header, const Body& body,
                                      const std::string& tag) {
  const auto headers = std::make_shared<Headers>();
  const auto comparison = comparison_of(header, tag, headers);
  control_->take_turn(comparison.header, comparison.keep, comparison.tag);
  take_turn(
      header, [&](Transport& data, const Headers&) { body(data, *headers); }, tag);
}

Work ProcessGroup::Impl::submit_compared(const OpHeader& header, Body body,
                                         const std::string& tag) {
  constexpr std::chrono::milliseconds kLook{20};
  const auto headers = std::make_shared<Headers>();
  auto compared = control_->queue_.add(
      [control = control_.get(), comparison = comparison_of(header, tag, headers)] {
        control->execute_in_turn(comparison.header, comparison.keep, comparison.tag);
      });
  auto moved = queue_.add([this, header, body = std::move(body), tag, headers, compared] {
    while (!compared->done_within(kLook)) {
      if (closing_) throw BrokenWorldError("ProcessGroup: the group was shut down", {});
    }
    if (compared->failed()) return;
    execute_in_turn(
        header, [&](Transport& data, const Headers&) { body(data, *headers); }, tag);
  });
  return Work(std::make_shared<ComparedWork>(std::move(compared), std::move(moved)));
}

}  // namespace tessera
