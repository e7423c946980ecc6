#include "comm/base/roll_call.h"

#include <algorithm>
#include <sstream>
#include <thread>

#include <fmt/format.h>

#include "tessera/detail/classic.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Entries = std::map<int, Presence>;

std::string text_of(const Entries& entries) {
  std::string text;
  for (const auto& [rank, presence] : entries)
    text += fmt::format("{} {} {}\n", rank, presence.size, presence.value);
  return text;
}

void add(Entries& entries, const std::vector<uint8_t>& written) {
  detail::Classic<std::istringstream> text(std::string(written.begin(), written.end()));
  int rank = 0;
  Presence presence;
  while (text >> rank >> presence.size) {
    text.ignore(1);
    std::getline(text, presence.value);
    entries[rank] = presence;
  }
}

/// The ranks from which this rank takes merged values: rank + 2^k for each 2^k below the largest
/// power of two that divides rank.
std::vector<int> children_of(int rank, int size) {
  std::vector<int> children;
  for (int step = 1; rank + step < size && (rank == 0 || step < (rank & -rank)); step *= 2)
    children.push_back(rank + step);
  return children;
}

class RollCall {
 public:
  RollCall(c10::intrusive_ptr<c10d::Store> store, std::string name, int size,
           Clock::time_point deadline)
      : store_(std::move(store)), name_(std::move(name)), size_(size), deadline_(deadline) {}

  Entries call(int rank, const std::string& value) {
    Entries entries{{rank, {size_, value}}};
    auto children = children_of(rank, size_);
    if (!children.empty()) write("came", rank, "");
    // A rank that was told another world size may wait for ranks that do not exist.
    read_all(std::move(children), "sum", entries, [&] { return !agree(entries); });
    write("sum", rank, text_of(entries));
    if (rank == 0) write("all", 0, text_of(entries));
    else read_all({0}, "all", entries, [] { return false; });
    return entries;
  }

 private:
  std::string key(const char* kind, int rank) const {
    return fmt::format("{}/{}/{}", name_, kind, rank);
  }

  void write(const char* kind, int rank, const std::string& text) {
    store_->set(key(kind, rank), std::vector<uint8_t>(text.begin(), text.end()));
  }

  bool agree(const Entries& entries) const {
    return std::all_of(entries.begin(), entries.end(),
                       [&](const auto& entry) { return entry.second.size == size_; });
  }

  template <typename Stop>
  void read_all(std::vector<int> ranks, const char* kind, Entries& entries, const Stop& stop) {
    auto pause = std::chrono::milliseconds(1);
    constexpr std::chrono::milliseconds kLongestPause{8};
    for (;;) {
      std::erase_if(ranks, [&](int rank) {
        if (!store_->check({key(kind, rank)})) return false;
        add(entries, store_->get(key(kind, rank)));
        return true;
      });
      if (ranks.empty() || stop()) return;
      if (Clock::now() > deadline_) throw RanksMissing(absent(ranks));
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, kLongestPause);
    }
  }

  /// The ranks without a key. If all have one, the ranks that this rank was waiting for.
  std::vector<int> absent(const std::vector<int>& awaited) {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank)
      if (!store_->check({key("came", rank)}) && !store_->check({key("sum", rank)}))
        ranks.push_back(rank);
    return ranks.empty() ? awaited : ranks;
  }

  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
  int size_;
  Clock::time_point deadline_;
};

}  // namespace

std::map<int, Presence> roll_call(const c10::intrusive_ptr<c10d::Store>& store,
                                  const std::string& name, int rank, int size,
                                  const std::string& value, Clock::time_point deadline) {
  return RollCall(store, name, size, deadline).call(rank, value);
}

}  // namespace tessera::comm
