#include "comm/store/verified_store.h"

#include <mutex>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// The time that a call may need for a further connection.
constexpr std::chrono::seconds kReconnectLimit{5};

std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> value(const std::string& text) { return {text.begin(), text.end()}; }

Clock::time_point end_of(std::chrono::milliseconds timeout) {
  const bool limited = timeout != c10d::Store::kNoTimeout && timeout < std::chrono::hours(24 * 365);
  return limited ? Clock::now() + timeout : Clock::time_point::max();
}

}  // namespace

/// The connections that no call uses at the moment, and the settings for new ones.
class VerifiedStore::Links {
 public:
  Links(StorePlace place, Clock::time_point deadline, std::shared_ptr<StoreServer> server)
      : server_(std::move(server)), place_(std::move(place)) {
    idle_.emplace_back(place_, deadline, false);
  }

  std::string ask(const StoreMessage& request, std::chrono::milliseconds timeout) {
    const auto deadline = end_of(timeout);
    try {
      auto link = take(deadline);
      auto reply = link.call(request, deadline);
      give_back(std::move(link));
      auto result = reply.parts.empty() ? "" : std::move(reply.parts[0]);
      if (static_cast<Reply>(reply.code) != Reply::done)
        throw UsageError(
            fmt::format("the store refuses a request of rank {}: {}", place_.rank, result));
      return result;
    } catch (const StoreLost& error) {
      const auto caller = fmt::format("rank {} of {}", place_.rank, place_.size);
      if (Clock::now() >= deadline)
        throw BrokenWorldError(fmt::format("{} waited {} ms for the store at {}:{} in vain", caller,
                                           timeout.count(), place_.address, place_.port),
                               {});
      throw BrokenWorldError(fmt::format("{} lost the store of rank 0 at {}:{}: {}", caller,
                                         place_.address, place_.port, error.what()),
                             {0});
    }
  }

 private:
  static constexpr size_t kMostIdle = 4;

  StoreLink take(Clock::time_point deadline) {
    {
      std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto link = std::move(idle_.back());
        idle_.pop_back();
        return link;
      }
    }
    return {place_, std::min(deadline, Clock::now() + kReconnectLimit), true};
  }

  void give_back(StoreLink link) {
    std::lock_guard lock(mutex_);
    if (idle_.size() < kMostIdle) idle_.push_back(std::move(link));
  }

  const std::shared_ptr<StoreServer> server_;  // outlives the connections
  const StorePlace place_;
  std::mutex mutex_;
  std::vector<StoreLink> idle_;
};

VerifiedStore::VerifiedStore(StorePlace place, std::chrono::milliseconds timeout,
                             std::shared_ptr<StoreServer> server)
    : VerifiedStore(
          std::make_shared<Links>(std::move(place), Clock::now() + timeout, std::move(server)),
          timeout) {}

VerifiedStore::VerifiedStore(std::shared_ptr<Links> links, std::chrono::milliseconds timeout)
    : links_(std::move(links)) {
  timeout_ = timeout;
}

VerifiedStore::~VerifiedStore() = default;

std::string VerifiedStore::ask(Request request, std::vector<std::string> parts) const {
  return links_->ask({static_cast<uint8_t>(request), std::move(parts)}, timeout_);
}

c10::intrusive_ptr<c10d::Store> VerifiedStore::clone() {
  return c10::intrusive_ptr<VerifiedStore>::unsafe_steal_from_new(
      new VerifiedStore(links_, timeout_));
}

void VerifiedStore::set(const std::string& key, const std::vector<uint8_t>& bytes) {
  ask(Request::set, {key, text(bytes)});
}

std::vector<uint8_t> VerifiedStore::compareSet(const std::string& key,
                                               const std::vector<uint8_t>& expected,
                                               const std::vector<uint8_t>& wanted) {
  return value(ask(Request::compare_set, {key, text(expected), text(wanted)}));
}

std::vector<uint8_t> VerifiedStore::get(const std::string& key) {
  return value(ask(Request::get, {key}));
}

int64_t VerifiedStore::add(const std::string& key, int64_t amount) {
  return std::stoll(ask(Request::add, {key, std::to_string(amount)}));
}

bool VerifiedStore::deleteKey(const std::string& key) {
  return ask(Request::delete_key, {key}) == "1";
}

bool VerifiedStore::check(const std::vector<std::string>& keys) {
  return ask(Request::check, keys) == "1";
}

int64_t VerifiedStore::getNumKeys() { return std::stoll(ask(Request::count_keys, {})); }

void VerifiedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void VerifiedStore::wait(const std::vector<std::string>& keys,
                         const std::chrono::milliseconds& timeout) {
  links_->ask({static_cast<uint8_t>(Request::wait), keys}, timeout);
}

}  // namespace tessera::comm
