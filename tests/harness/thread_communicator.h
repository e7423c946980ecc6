#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tessera/detail/communicator.h"
#include "tessera/error.h"

namespace tessera::testing {

/// Stands for MPI between threads. As MPI does with large messages, it moves one only while both of
/// its ends call it: the sender offers, the receiver accepts, the sender moves it.
class ThreadCommunicator final : public detail::Communicator {
 public:
  /// The ranks of one communicator. `refusal`: see refuses_threads().
  static std::vector<std::shared_ptr<ThreadCommunicator>> make(int size, std::string refusal = "") {
    const auto shared = std::make_shared<Shared>(size);
    std::vector<std::shared_ptr<ThreadCommunicator>> ranks;
    for (int rank = 0; rank < size; ++rank)
      ranks.push_back(std::make_shared<ThreadCommunicator>(shared, rank, refusal));
    return ranks;
  }

  struct Shared;
  ThreadCommunicator(std::shared_ptr<Shared> shared, int rank, std::string refusal)
      : shared_(std::move(shared)), rank_(rank), refusal_(std::move(refusal)) {}

  int rank() const override { return rank_; }
  int size() const override { return shared_->size; }
  std::string refuses_threads() const override { return refusal_; }

  std::vector<std::string> all_gather(const std::string& mine, Deadline deadline) override {
    std::unique_lock lock(shared_->mutex);
    auto& round = shared_->rounds[round_++];
    round.push_back({rank_, mine});
    shared_->changed.notify_all();
    const auto complete = [&] { return round.size() == static_cast<size_t>(size()); };
    if (!shared_->changed.wait_until(lock, deadline, complete))
      throw BrokenWorldError("ranks are missing", {});
    std::sort(round.begin(), round.end());
    std::vector<std::string> texts;
    for (const auto& [rank, text] : round) texts.push_back(text);
    return texts;
  }

  std::shared_ptr<Communicator> subset(const std::vector<int>& ranks, int number) override {
    std::unique_lock lock(shared_->mutex);
    auto& made = shared_->subsets[{ranks, number}];
    if (!made.first) made.first = std::make_shared<Shared>(static_cast<int>(ranks.size()));
    const auto subset = made.first;
    if (++made.second == subset->size) shared_->subsets.erase({ranks, number});
    const auto own = std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin();
    return std::make_shared<ThreadCommunicator>(subset, static_cast<int>(own), refusal_);
  }

  std::unique_ptr<Transfer> send(at::Tensor tensor, int to, int tag) override {
    return std::make_unique<Flight>(shared_, Key{rank_, to, tag}, true, std::move(tensor));
  }
  std::unique_ptr<Transfer> receive(at::Tensor tensor, int from, int tag) override {
    return std::make_unique<Flight>(shared_, Key{from, rank_, tag}, false, std::move(tensor));
  }

  using Key = std::tuple<int, int, int>;  // from, to, tag
  class Flight;
  struct Shared {
    explicit Shared(int ranks) : size(ranks) {}
    const int size;
    std::mutex mutex;
    std::condition_variable changed;
    std::map<int, std::vector<std::pair<int, std::string>>> rounds;
    std::map<std::pair<std::vector<int>, int>, std::pair<std::shared_ptr<Shared>, int>> subsets;
    std::map<Key, std::deque<Flight*>> sent, expected;  // in order, not complete
  };

  class Flight final : public Transfer {
   public:
    Flight(std::shared_ptr<Shared> shared, Key key, bool sends, at::Tensor tensor)
        : shared_(std::move(shared)), key_(key), sends_(sends), tensor_(std::move(tensor)) {
      std::lock_guard lock(shared_->mutex);
      mine().push_back(this);
    }
    ~Flight() override {
      std::lock_guard lock(shared_->mutex);
      std::erase(mine(), this);
    }
    bool test() override {
      std::lock_guard lock(shared_->mutex);
      auto& receivers = shared_->expected[key_];
      if (!sends_) accepts_ |= offered(shared_->sent[key_]);
      else offers_ = true;
      if (!complete_ && sends_ && mine().front() == this && !receivers.empty() &&
          receivers.front()->accepts_) {
        auto* const receiver = receivers.front();
        if (receiver->tensor_.nbytes() != tensor_.nbytes())
          throw std::runtime_error("another number of bytes arrived");
        std::memcpy(receiver->tensor_.data_ptr(), tensor_.data_ptr(), tensor_.nbytes());
        complete_ = receiver->complete_ = true;
        mine().pop_front();
        receivers.pop_front();
      }
      return complete_;
    }

   private:
    /// Whether the sender of this message has called.
    bool offered(const std::deque<Flight*>& senders) {
      const auto place = std::find(mine().begin(), mine().end(), this) - mine().begin();
      return place < static_cast<int64_t>(senders.size()) && senders[place]->offers_;
    }
    std::deque<Flight*>& mine() { return (sends_ ? shared_->sent : shared_->expected)[key_]; }

    const std::shared_ptr<Shared> shared_;
    const Key key_;
    const bool sends_;
    const at::Tensor tensor_;
    bool complete_ = false, offers_ = false, accepts_ = false;
  };

 private:
  const std::shared_ptr<Shared> shared_;
  const int rank_;
  const std::string refusal_;
  int round_ = 0;
};

}  // namespace tessera::testing
