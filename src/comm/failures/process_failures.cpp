#include "comm/failures/process_failures.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "comm/base/call_with_timeout.h"
#include "comm/failures/failure_record.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// The members of a group among these ranks of the start-up group.
std::vector<int> members_among(const std::vector<int>& world_ranks, const std::vector<int>& ranks) {
  std::vector<int> members;
  for (size_t member = 0; member < world_ranks.size(); ++member)
    if (std::count(ranks.begin(), ranks.end(), world_ranks[member]))
      members.push_back(static_cast<int>(member));
  return members;
}

}  // namespace

void ProcessFailures::add(const World& group) {
  if (!group.store) return;
  std::lock_guard lock(mutex_);
  groups_.push_back({group.store, group.rank, group.world_ranks});
  serves_ = group.start_group.rank_0_serves && group.world_ranks[group.rank] == 0;
}

void ProcessFailures::remove(const World& group) {
  std::lock_guard lock(mutex_);
  std::erase_if(groups_, [&](const Group& known) { return known.store == group.store; });
}

void ProcessFailures::tell_others(const World& broken, const std::vector<int>& blamed) noexcept {
  if (store_is_silent) return;
  try {
    struct Note {
      Group group;
      std::vector<int> blamed;
    };
    std::vector<Note> notes;
    {
      std::lock_guard lock(mutex_);
      for (const Group& group : groups_) {
        auto members = members_among(group.world_ranks, blamed);
        if (group.store == broken.store || members.empty()) continue;
        // The others gave up on this rank, and have decided already.
        if (std::count(members.begin(), members.end(), group.rank)) continue;
        notes.push_back({group, std::move(members)});
        told_.push_back(group);
        blamed_ = blamed;
        any_told_ = true;
      }
    }
    if (notes.empty()) return;
    const auto told = call_with_timeout(limit_of_answer(this), [notes = std::move(notes)] {
      for (const Note& note : notes) {
        const auto& [store, rank, _] = note.group;
        // The group's own failure, if it has one, says more.
        if (!read_failure(store, rank))
          write_failure(store, rank, {next_failure(store), false, note.blamed});
      }
      return true;
    });
    if (!told) store_is_silent = true;
  } catch (...) {
    // The others see this rank leave, as without the record.
  }
}

void ProcessFailures::withdraw(const World& group) noexcept {
  if (!any_told_) return;
  try {
    std::lock_guard lock(mutex_);
    const auto known = std::find_if(told_.begin(), told_.end(),
                                    [&](const Group& told) { return told.store == group.store; });
    if (known == told_.end()) return;
    call_with_timeout(limit_of_answer(this),
                      [group = *known] { return group.store->deleteKey(failure_key(group.rank)); });
    told_.erase(known);
    any_told_ = !told_.empty();
  } catch (...) {
    // The store has ended.
  }
}

ProcessFailures::~ProcessFailures() {
  if (!serves_ || told_.empty() || store_is_silent) return;
  try {
    call_with_timeout(std::chrono::milliseconds(500), [told = told_, blamed = blamed_] {
      std::set<int> awaited;
      for (const Group& group : told)
        awaited.insert(group.world_ranks.begin(), group.world_ranks.end());
      for (const int rank : blamed) awaited.erase(rank);
      const auto deadline = Clock::now() + std::chrono::milliseconds(500);
      while (Clock::now() < deadline) {
        for (const Group& group : told) {
          for (size_t member = 0; member < group.world_ranks.size(); ++member)
            if (awaited.contains(group.world_ranks[member]) &&
                read_failure(group.store, static_cast<int>(member)))
              awaited.erase(group.world_ranks[member]);
        }
        if (awaited.empty()) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
      return true;
    });
  } catch (...) {
    // No thread can be started.
  }
}

std::chrono::milliseconds limit_of_answer(const ProcessFailures* failures) {
  return std::chrono::milliseconds(failures && failures->store_is_silent ? 100 : 1000);
}

}  // namespace tessera::comm
