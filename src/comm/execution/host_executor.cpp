#include "comm/execution/host_executor.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <fmt/format.h>

#include "comm/execution/diverged.h"
#include "comm/execution/running_scope.h"
#include "comm/failures/process_failures.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/step/agreement.h"

namespace tessera::comm {
namespace {

bool differ(const OpHeader& a, const OpHeader& b) {
  return a.op != b.op || a.sequence != b.sequence || a.dtype != b.dtype || a.root != b.root ||
         a.detail != b.detail || a.on_device != b.on_device ||
         (a.numel != b.numel && !(a.free_numel && b.free_numel));
}

}  // namespace

HostExecutor::HostExecutor(const World& world, Transport* transport,
                           std::shared_ptr<WaitClock> clock, bool compares)
    : world_(world),
      transport_(transport),
      compares_(compares),
      failure_(world),
      queue_(std::move(clock)) {}

Work HostExecutor::issue(Call call, Mode mode) {
  if (mode == Mode::work)
    return queue_.submit([this, call = std::move(call)]() mutable { execute(std::move(call)); });
  if (const auto turn = queue_.try_turn()) execute(std::move(call));
  else queue_.submit([&] { execute(std::move(call)); }).wait();
  return {};
}

void HostExecutor::check_open() {
  queue_.throw_unseen_error();
  failure_.throw_if_ended();
}

void HostExecutor::execute(Call call) {
  auto& header = call.header;
  if (header.may_diverge && diverged_)
    throw Diverged("ProcessGroup: the ranks disagree about an earlier collective");
  check_open();
  // The thread of a queue may only write to a tensor of an InferenceMode in one.
  std::optional<c10::InferenceMode> inference;
  const auto is_inference = [](const at::Tensor& tensor) { return tensor.is_inference(); };
  if (std::any_of(call.tensors.begin(), call.tensors.end(), is_inference)) inference.emplace();
  const at::NoGradGuard no_grad;
  header.sequence = ++sequence_;
  RunningScope running(world_, *transport_, header, call.tag);
  try {
    Headers headers;
    const bool compares = compares_ && (world_.options.check_collectives || header.free_numel);
    if (compares) headers = compare(call);
    if (compares || !compares_) running.begun_by_all();
    if (call.feedback) transport_->set_feedback(call.feedback.get());
    call.body(*transport_, headers);
    if (call.feedback) transport_->set_feedback(nullptr);
  } catch (...) {
    failure_.rethrow(call);
  }
  // Barriers may be a part of ending after an error.
  if (header.op == Op::barrier) return;
  detail::withdraw_report();
  if (world_.failures) world_.failures->withdraw(world_);
}

/// `other`: a rank whose header is not that of rank 0.
std::string HostExecutor::disagreement(const Headers& headers, int other,
                                       const std::string& tag) const {
  // All ranks know that they disagree; now they exchange their tags.
  constexpr size_t kLength = 96;
  auto padded = tag.substr(0, kLength - 1);
  padded.resize(kLength);
  auto tags = gather_texts(*transport_, world_.rank, padded, Counts(world_.size, kLength));
  for (auto& text : tags) text = text.c_str();
  const auto call = [&](int rank) {
    return describe(headers[rank]) + (tags[rank].empty() ? "" : fmt::format(" ({})", tags[rank]));
  };
  const auto &first = headers[0], &second = headers[other];
  const bool counts = tags[0] == tags[other] && first.op == second.op &&
                      first.numel == second.numel && first.dtype == second.dtype;
  const bool moved = headers[world_.rank].on_device && !transport_->waits_for_device();
  return fmt::format(
      "ProcessGroup: the ranks disagree about a collective: rank 0 calls {}, rank {} calls {}{}; "
      "{} (seen on rank {})",
      call(0), other, call(other), counts ? " (with other counts per rank)" : "",
      moved ? "the device may have moved data" : "no data was moved", world_.rank);
}

Headers HostExecutor::compare(const Call& call) {
  auto headers = transport_->exchange(call.header);
  if (const auto text = failure_.gather(*transport_, headers, ""); !text.empty()) {
    failure_.end(text, true);
    throw AgreedError(text);
  }
  for (int r = 1; r < world_.size; ++r) {
    if (!differ(headers[0], headers[r])) continue;
    const auto text = disagreement(headers, r, call.tag);
    if (std::all_of(headers.begin(), headers.end(), [](auto& each) { return each.may_diverge; })) {
      diverged_ = true;
      throw Diverged(text);
    }
    const auto began = detail::minority(
        world_.size, [&](int a, int b) { return !differ(headers[a], headers[b]); });
    detail::report_agreed(world_.in_world(began), text);
    throw UsageError(text);
  }
  return headers;
}

Work HostExecutor::announce(const std::string& message) {
  const bool alone = world_.size == 1;
  failure_.end(message, alone);
  if (alone) return {};
  OpHeader header;
  header.op = Op::fail;
  header.numel = static_cast<int64_t>(message.size());
  header.free_numel = 1;
  // Queued behind earlier operations, because the other ranks make these too. If another rank has
  // failed meanwhile, an earlier operation has received its message, and no rank would answer here.
  return queue_.submit([this, header, message]() mutable {
    if (failure_.shared()) return;
    try {
      queue_.throw_unseen_error();  // the other ranks have left with this error
    } catch (const GroupEnded&) {   // an operation that was queued before this one
    }
    header.sequence = ++sequence_;
    failure_.end(failure_.gather(*transport_, transport_->exchange(header), message), true);
  });
}

Work HostExecutor::end_behind(const std::string& message) {
  return queue_.submit([this, message] { failure_.end(message, false); });
}

namespace {

/// Waits until all of these works are done, at most `limit`. Each of the other ranks waits in one
/// of the groups, and different ranks may wait in different groups. No rank answers in the
/// remaining groups. The wait therefore also ends half a second after the first of `announced` is
/// done, or, if `informed`, after the call.
void wait_for_some(const std::vector<Work>& announced, const std::vector<Work>& owed, bool informed,
                   std::chrono::milliseconds limit) {
  constexpr std::chrono::milliseconds kOtherGroups{500}, kPollWorks{2};
  const auto is_done = [](const Work& work) { return work.done(); };
  auto now = std::chrono::steady_clock::now();
  auto give_up = now + limit;
  for (bool limited = false; now <= give_up; now = std::chrono::steady_clock::now()) {
    const auto done = std::count_if(announced.begin(), announced.end(), is_done);
    if (done == static_cast<int64_t>(announced.size()) &&
        std::all_of(owed.begin(), owed.end(), is_done))
      return;
    if (!limited && (informed || done > 0)) {
      limited = true;
      give_up = std::min(give_up, now + kOtherGroups);
    }
    std::this_thread::sleep_for(kPollWorks);
  }
}

}  // namespace

void fail(HostExecutor& group, const std::vector<HostExecutor*>& below,
          const std::string& message) {
  const std::string text = message.empty() ? "failed" : message;
  const auto& world = group.world();
  auto& failure = group.failure();
  if (!failure.shared()) detail::report_agreed(world.in_world({world.rank}), text);
  std::vector<Work> announced;
  // Collectives that all ranks have begun, in groups whose headers another group compares.
  std::vector<Work> owed;
  // A sub-group has ended: a rank that failed there may not answer here any more.
  bool informed = false;
  for (auto* const other : below)
    if (other->failure().ended()) informed = true;
    else if (other->compares()) announced.push_back(other->announce(text));
    else owed.push_back(other->end_behind(text));
  Work own = group.announce(text);
  if (below.empty()) {
    own.wait();
  } else {
    announced.push_back(own);
    wait_for_some(announced, owed, informed, world.options.timeout);
    try {
      if (!own.done()) throw UsageError(text);
      own.wait();
    } catch (const Error&) {
      throw UsageError(text);  // ranks that were informed in a sub-group have left already
    }
  }
  if (failure.shared()) throw AgreedError(failure.text());
  throw UsageError(failure.text());
}

}  // namespace tessera::comm
