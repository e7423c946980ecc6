#include "comm/execution/group_failure.h"

#include <utility>

#include "comm/failures/process_failures.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/step/agreement.h"

namespace tessera::comm {
namespace {

/// Adds the collective's number and purpose to the text of an error. A transport does not know the
/// purpose, and the number only if headers were exchanged.
std::string with_call(std::string text, const Call& call) {
  const auto described = describe(call.header);
  if (text.find(described) == std::string::npos) text += "; the collective is " + described;
  return call.tag.empty() ? text : text + "; its purpose: " + call.tag;
}

}  // namespace

void GroupFailure::end(std::string text, bool shared) {
  {
    std::lock_guard lock(mutex_);
    if (!shared_) text_ = std::move(text);
    shared_ = shared_ || shared;
  }
  ended_ = true;
}

void GroupFailure::lose(const std::string& text, const std::vector<int>& lost) {
  {
    std::lock_guard lock(mutex_);
    lost_ = std::make_exception_ptr(BrokenWorldError(text, lost));
  }
  broken_ = true;
  end(text, true);
  report_broken(lost, text);
}

bool GroupFailure::shared() const {
  std::lock_guard lock(mutex_);
  return shared_;
}

std::string GroupFailure::text() const {
  std::lock_guard lock(mutex_);
  return text_;
}

void GroupFailure::throw_if_ended() const {
  if (!ended_) return;
  std::lock_guard lock(mutex_);
  if (lost_) std::rethrow_exception(lost_);
  throw GroupEnded("ProcessGroup: the group has ended: " + text_);
}

void GroupFailure::report_broken(const std::vector<int>& members, const std::string& text) {
  if (leaving_) return;
  const auto blamed = world_.in_world(members);
  if (world_.failures) world_.failures->tell_others(world_, blamed);
  detail::report_broken(blamed, text);
}

void GroupFailure::rethrow(const Call& call) {
  try {
    throw;
  } catch (const BrokenWorldError& error) {
    broken_ = true;
    const auto text = with_call(error.what(), call);
    report_broken(error.ranks(), text);
    throw BrokenWorldError(text, error.ranks());
  } catch (const WrongResult& error) {
    throw AgreedError("ProcessGroup: " + with_call(error.what(), call));
  }
}

std::string GroupFailure::gather(Transport& transport, const Headers& headers,
                                 const std::string& mine) const {
  Counts sizes;
  std::vector<int> began;
  for (int r = 0; r < world_.size; ++r) {
    sizes.push_back(headers[r].op == Op::fail ? headers[r].numel : 0);
    if (sizes.back() > 0) began.push_back(r);
  }
  if (began.empty()) return "";
  const auto texts = gather_texts(transport, world_.rank, mine, sizes);
  std::string lines;
  for (const int r : began) lines += (lines.empty() ? "" : "\n") + texts[r];
  detail::report_agreed(world_.in_world(began), lines);
  return lines;
}

}  // namespace tessera::comm
