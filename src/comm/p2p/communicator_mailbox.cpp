#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "comm/base/roll_call.h"
#include "comm/base/sigpipe_blocked.h"
#include "comm/p2p/mailbox.h"
#include "tessera/detail/communicator.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Communicator = detail::Communicator;

class CommunicatorMailbox;

class CommunicatorMessage : public Message {
 public:
  CommunicatorMessage(CommunicatorMailbox& mailbox,
                      std::unique_ptr<Communicator::Transfer> transfer)
      : mailbox_(mailbox), transfer_(std::move(transfer)) {}
  ~CommunicatorMessage() override;
  void wait(std::chrono::milliseconds timeout) override;
  void abort() noexcept override { aborted_ = true; }

 private:
  friend class CommunicatorMailbox;
  CommunicatorMailbox& mailbox_;
  std::unique_ptr<Communicator::Transfer> transfer_;
  bool complete_ = false;
  std::string failure_;
  std::atomic<bool> aborted_ = false;
};

/// MPI carries a large message on only while both its ends call MPI, and a rank may wait for
/// another one of its host meanwhile. So a thread calls MPI while messages are moving. A rank that
/// waits for a message calls MPI itself, which is faster.
class CommunicatorMailbox : public Mailbox {
 public:
  explicit CommunicatorMailbox(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {
    const SigpipeBlocked inherited;
    thread_ = std::thread([this] { run(); });
  }
  ~CommunicatorMailbox() override {
    {
      std::lock_guard lock(mutex_);
      ending_ = true;
    }
    posted_.notify_one();
    thread_.join();
  }

  const char* name() const override { return "mpi"; }
  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    return post(communicator_->send(std::move(tensor), to, tag));
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    return post(communicator_->receive(std::move(tensor), from, tag));
  }

 private:
  friend class CommunicatorMessage;

  std::unique_ptr<Message> post(std::unique_ptr<Communicator::Transfer> transfer) {
    auto message = std::make_unique<CommunicatorMessage>(*this, std::move(transfer));
    std::lock_guard lock(mutex_);
    if (under_way_.empty()) posted_.notify_one();
    under_way_.push_back(message.get());
    return message;
  }

  /// With the lock.
  void carry_on() {
    std::erase_if(under_way_, [](CommunicatorMessage* message) {
      try {
        message->complete_ = message->transfer_->test();
      } catch (const std::exception& error) {
        message->failure_ = error.what();
      }
      return message->complete_ || !message->failure_.empty();
    });
  }

  void run() {
    constexpr std::chrono::microseconds kPause{50};
    std::unique_lock lock(mutex_);
    while (!ending_) {
      posted_.wait(lock, [&] { return ending_ || !under_way_.empty(); });
      carry_on();
      lock.unlock();
      std::this_thread::sleep_for(kPause);
      lock.lock();
    }
  }

  const std::shared_ptr<Communicator> communicator_;
  std::mutex mutex_;  // guards what follows, and all messages
  std::condition_variable posted_;
  std::vector<CommunicatorMessage*> under_way_;
  bool ending_ = false;
  std::thread thread_;
};

CommunicatorMessage::~CommunicatorMessage() {
  std::lock_guard lock(mailbox_.mutex_);
  std::erase(mailbox_.under_way_, this);
}

void CommunicatorMessage::wait(std::chrono::milliseconds timeout) {
  constexpr int kEager = 2000;
  constexpr std::chrono::microseconds kPause{20};
  const auto deadline = Clock::now() + timeout;
  for (int tries = 0;; ++tries) {
    {
      std::lock_guard lock(mailbox_.mutex_);
      mailbox_.carry_on();
      if (complete_) return;
      if (!failure_.empty()) throw std::runtime_error(failure_);
    }
    if (aborted_) throw std::runtime_error("aborted");
    if (Clock::now() >= deadline) throw std::runtime_error("no message in time");
    if (tries < kEager) std::this_thread::yield();
    else std::this_thread::sleep_for(kPause);
  }
}

/// Differs between groups that have two members in common.
int number_of(const World& world, const std::string& of_first_member) {
  return std::stoi(of_first_member) * world.start_group.size + world.world_ranks[0];
}

}  // namespace

std::unique_ptr<Mailbox> make_communicator_mailbox(const World& world) {
  const auto& communicator = world.start_group.communicator;
  if (!communicator)
    throw UsageError(fmt::format(
        "ProcessGroup: rank {}: backend is MPI, and this world was not made of a communicator; "
        "expected init_process_group(MPI_Comm) of tessera/mpi.h, or another backend",
        world.rank));
  static std::atomic<int> groups = 0;
  const auto broken = [&](const std::string& cause, const std::vector<int>& ranks) {
    return BrokenWorldError(
        fmt::format("ProcessGroup: rank {} of {} could not meet the other ranks over MPI within {} "
                    "ms: {}",
                    world.rank, world.size, world.options.timeout.count(), cause),
        ranks);
  };
  try {
    // MPI waits for the members without a limit, so all have come before it is called.
    const auto present =
        roll_call(world.store, "mpi", world.rank, world.size, std::to_string(groups++ % 1024),
                  Clock::now() + world.options.timeout);
    return std::make_unique<CommunicatorMailbox>(
        communicator->subset(world.world_ranks, number_of(world, present.at(0).value)));
  } catch (const RanksMissing& missing) {
    throw broken(rank_list(missing.ranks) + " did not arrive", missing.ranks);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw broken(compat::first_line(error.what()), {});
  }
}

}  // namespace tessera::comm
