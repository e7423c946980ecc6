#include "comm/p2p/messenger.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "comm/base/flat_tensor.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTagsPerOp = 1 << 10;
constexpr int kTagLimit = 1 << 30;
constexpr Messenger::Ticket kNothing = SIZE_MAX;  // a message without elements
// Waits end at the deadline. A rank that notices it so much later did not run.
constexpr auto kOverdue = std::chrono::seconds(1);

}  // namespace

Messenger::Messenger(const World& world, std::unique_ptr<Mailbox> mailbox,
                     std::chrono::milliseconds grace)
    : mailbox_(std::move(mailbox)),
      ledger_(world, grace),
      rank_(world.rank),
      size_(world.size),
      timeout_(world.options.timeout),
      former_(world.options.timeout),
      liveness_(world) {}

Messenger::~Messenger() { set_silence(timeout_.load()); }

void Messenger::set_silence(std::chrono::milliseconds silence, std::function<void()> on_loss) {
  liveness_.end();
  if (failed_ || silence >= timeout_.load()) return;
  liveness_.begin(
      {silence, std::max(silence, former_.load())},
      [this, on_loss = std::move(on_loss)](const std::vector<int>& lost) { lose(lost, on_loss); });
}

void Messenger::lose(std::vector<int> ranks, const std::function<void()>& on_loss) {
  if (ranks.empty() && ledger_.server() >= 0) ranks.push_back(ledger_.server());
  if (ranks.empty()) {
    std::lock_guard lock(mutex_);
    for (const auto& item : flying_)
      if (item.message && ranks.empty()) ranks.push_back(item.peer);
  }
  resolve(ranks, FailureLedger::Cause::late);
  lost_ = true;
  {
    std::lock_guard lock(mutex_);
    for (auto& item : flying_)
      if (item.message) item.message->abort();
  }
  if (on_loss) on_loss();
}

std::vector<int> Messenger::resolve(const std::vector<int>& suspects, FailureLedger::Cause cause) {
  std::lock_guard lock(failure_.mutex);
  // A rank that leaves by itself blames no other in its records.
  auto& blamed = failure_.blamed;
  if (!blamed) blamed = aborted_ ? suspects : ledger_.resolve(suspects, cause);
  return *blamed;
}

void Messenger::begin(std::string operation) {
  if (failed_) throw BrokenWorldError(failure_.text, resolve({}, FailureLedger::Cause::gone));
  collective_.name = std::move(operation);
  collective_.deadline = Clock::now() + timeout_.load();
  collective_.tag = collective_.next_tag;
  collective_.next_tag = (collective_.next_tag + kTagsPerOp) % kTagLimit;
}

Messenger::Ticket Messenger::send(at::Tensor tensor, int peer, int part) {
  return post(std::move(tensor), peer, part, true);
}

Messenger::Ticket Messenger::receive(at::Tensor tensor, int peer, int part) {
  return post(std::move(tensor), peer, part, false);
}

Messenger::Ticket Messenger::post(at::Tensor tensor, int peer, int part, bool sending) {
  if (tensor.numel() == 0) return kNothing;
  std::lock_guard lock(mutex_);
  if (aborted_) fail({peer}, "the process group was shut down");
  if (lost_) fail({peer}, "");
  try {
    const int tag = collective_.tag + part % kTagsPerOp;
    auto message =
        sending ? mailbox_->send(tensor, peer, tag) : mailbox_->receive(tensor, peer, tag);
    if (sending) {
      ++sent_.messages;
      sent_.bytes += tensor.nbytes();
    }
    flying_.push_back({std::move(tensor), std::move(message), peer});
  } catch (const std::exception& error) {
    fail({peer}, error.what());
  }
  return flying_.size() - 1;
}

void Messenger::wait(Ticket ticket) {
  if (ticket == kNothing || !flying_[ticket].message) return;
  auto& item = flying_[ticket];
  // Rounded up: a wait that ends before the deadline means that the peer is gone, not late.
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(collective_.deadline - Clock::now());
  try {
    item.message->wait(std::max(left, std::chrono::milliseconds(1)));
  } catch (const DamagedMessage& error) {
    fail({std::min(rank_, item.peer), std::max(rank_, item.peer)}, error.what(), false, true);
  } catch (const std::exception& error) {
    fail({item.peer}, error.what());
  }
  std::lock_guard lock(mutex_);
  item.message.reset();
  item.tensor = at::Tensor();
}

void Messenger::finish() {
  for (Ticket ticket = 0; ticket < flying_.size(); ++ticket) wait(ticket);
  std::lock_guard lock(mutex_);
  flying_.clear();
}

void Messenger::gather_blocks(const at::Tensor& table, const std::vector<int64_t>& counts,
                              const std::vector<int>& members) {
  const size_t n = members.size();
  const size_t own = std::find(members.begin(), members.end(), rank_) - members.begin();
  // Blocks in the order own, own + 1, …, so that the first blocks are one message.
  std::vector<int64_t> starts(n + 1, 0);
  for (size_t i = 0; i < n; ++i) starts[i + 1] = starts[i] + counts[(own + i) % n];
  auto rotated = at::empty_like(table);
  const auto blocks = [&](size_t begin, size_t end) {
    return rotated.narrow(0, starts[begin], starts[end] - starts[begin]);
  };
  blocks(0, 1).copy_(segment_of(table, counts, static_cast<int>(own)));
  for (size_t have = 1, round = 0; have < n; have *= 2, ++round) {
    const size_t more = std::min(have, n - have);
    const int part = static_cast<int>(round);
    const auto ticket = receive(blocks(have, have + more), members[(own + have) % n], part);
    send(blocks(0, more), members[(own + n - have) % n], part);
    wait(ticket);
  }
  finish();
  for (size_t i = 1; i < n; ++i) {
    const size_t block = (own + i) % n;
    segment_of(table, counts, static_cast<int>(block)).copy_(blocks(i, i + 1));
  }
}

void Messenger::abort() noexcept {
  std::lock_guard lock(mutex_);
  aborted_ = true;
  for (auto& item : flying_)
    if (item.message) item.message->abort();
}

void Messenger::fail(const std::vector<int>& suspects, const std::string& cause, bool here,
                     bool damage) {
  using Cause = FailureLedger::Cause;
  const auto left = collective_.deadline - Clock::now();
  const bool late = left.count() <= 0;
  const auto watch = liveness_.current();
  const auto blamed =
      resolve(suspects, damage                                               ? Cause::damage
                        : left < -kOverdue || (watch && watch->was_paused()) ? Cause::overdue
                        : late && here                                       ? Cause::late_here
                        : late                                               ? Cause::late
                        : left < timeout_.load() / 2 ? Cause::gone_near_the_time_out
                                                     : Cause::gone);
  const bool silent = lost_ || (watch && std::all_of(blamed.begin(), blamed.end(), [&](int rank) {
                                  return watch->is_silent(rank);
                                }));
  const auto waited = silent ? liveness_.silence() : timeout_.load();
  const auto text = ledger_.found_damage() ? "exchanged a message that was damaged on the way"
                    : blamed == std::vector<int>{rank_}
                        ? "is this one: the others gave up on it earlier (it was stopped, or late)"
                    : late || silent
                        ? fmt::format("did not arrive within {} ms", waited.count())
                        : "is gone (it died, or ended, or its process group was destroyed)";
  failure_.text = fmt::format(
      "ProcessGroup ({}): rank {} of {} gave up in {}: {} {}. Cause: {}", name(), rank_, size_,
      collective_.name, rank_list(blamed), text,
      lost_ ? "a process does not run, or cannot be reached" : compat::first_line(cause.c_str()));
  failed_ = true;
  throw BrokenWorldError(failure_.text, blamed);
}

}  // namespace tessera::comm
