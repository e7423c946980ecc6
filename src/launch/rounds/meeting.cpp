#include "launch/rounds/meeting.h"

#include <cerrno>
#include <cstring>
#include <exception>

#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "launch/identity.h"
#include "launch/rounds/contact.h"
#include "tessera/error.h"

namespace tessera::launch {
namespace {

constexpr std::chrono::milliseconds kBeat{200};
// In this time the other launchers read the last order and leave.
constexpr std::chrono::milliseconds kFarewell{5000};

/// The flags that must agree on all hosts.
std::string settings_of(const LaunchOptions& options) {
  const auto least = options.min_nnodes.value_or(options.nnodes);
  return "--nnodes " + std::to_string(least) + ":" + std::to_string(options.nnodes) +
         " --max-restarts " + std::to_string(options.max_restarts);
}

}  // namespace

Meeting::Meeting(const LaunchOptions& options)
    : options_(options), news_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!news_) throw UsageError(std::string("no eventfd for the meeting: ") + std::strerror(errno));
  own_.node = *options.node_rank;
  own_.incarnation = random_id();
  own_.host = host_name();
  own_.settings = settings_of(options);
  own_.ranks = options.nproc_per_node;
  contact_ = std::make_unique<Contact>(options, own_.settings);
  // The launcher's signals belong to its first thread.
  sigset_t all, former;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &former);
  thread_ = std::thread([this] { run(); });
  pthread_sigmask(SIG_SETMASK, &former, nullptr);
}

Meeting::~Meeting() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = changed_ = own_.left = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Meeting::run() {
  std::unique_lock lock(mutex_);
  try {
    while (!stopping_) {
      publish(lock);
      wake_.wait_for(lock, kBeat, [this] { return changed_; });
    }
    const auto end = Contact::Clock::now() + kFarewell;
    do {
      publish(lock);
      wake_.wait_for(lock, kBeat / 4, [] { return false; });
    } while (!contact_->all_left() && Contact::Clock::now() < end);
  } catch (...) {
    if (!lock.owns_lock()) lock.lock();
    error_ = std::current_exception();
    eventfd_write(news_.get(), 1);
  }
}

/// Writes and reads once, and does not hold the lock meanwhile.
void Meeting::publish(std::unique_lock<std::mutex>& lock) {
  changed_ = false;
  ++own_.beat;
  const NodeDocument own = own_;
  lock.unlock();
  const auto order = contact_->exchange(own);
  lock.lock();
  if (!order || *order == order_) return;
  order_ = *order;
  eventfd_write(news_.get(), 1);
}

Order Meeting::take() {
  eventfd_t ignored;
  (void)eventfd_read(news_.get(), &ignored);
  std::lock_guard lock(mutex_);
  if (error_) std::rethrow_exception(error_);
  if (!order_.settings.empty() && order_.settings != own_.settings)
    throw UsageError("the flags of node " + std::to_string(own_.node) + " are '" + own_.settings +
                     "': expected those of node 0, '" + order_.settings + "'");
  return order_;
}

std::optional<Order> Meeting::end_of_round() {
  eventfd_t ignored;
  (void)eventfd_read(news_.get(), &ignored);
  std::lock_guard lock(mutex_);
  Order end = order_;
  if (error_) {
    end.kind = Order::Kind::fail;
    try {
      std::rethrow_exception(error_);
    } catch (const std::exception& error) {
      end.text = error.what();
    }
    return end;
  }
  if (order_.round == own_.began) {
    if (order_.kind == Order::Kind::begin) return std::nullopt;
    // While node 0 gathers the hosts again, the ranks of the last round must have ended.
    if (order_.kind != Order::Kind::wait && order_.kind != Order::Kind::over) return end;
  }
  end.kind = Order::Kind::fail;
  end.text = "the other hosts went on without " + name_of_node(own_.node, own_.host) +
             ", because node 0 did not hear of its launcher for " +
             seconds_text(options_.rejoin_timeout.value_or(kRejoinTimeout)) +
             " s (--rejoin-timeout)";
  return end;
}

int Meeting::place_in(const Order& order) const {
  std::lock_guard lock(mutex_);
  return order.kind == Order::Kind::begin && order.round > own_.began ? order.place_of(own_) : -1;
}

void Meeting::begin(int round) {
  {
    std::lock_guard lock(mutex_);
    own_.began = round;
    own_.end = NodeDocument::End::none;
    own_.text.clear();
    changed_ = true;
  }
  wake_.notify_all();
}

void Meeting::end(NodeDocument::End how, std::string text, bool cause_known, bool final) {
  {
    std::lock_guard lock(mutex_);
    own_.ended = own_.began;
    own_.end = how;
    own_.text = std::move(text);
    own_.cause_known = cause_known;
    own_.final = final;
    changed_ = true;
  }
  wake_.notify_all();
}

}  // namespace tessera::launch
