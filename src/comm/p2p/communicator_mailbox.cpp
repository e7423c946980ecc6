#include <atomic>
#include <chrono>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "comm/base/roll_call.h"
#include "comm/p2p/mailbox.h"
#include "tessera/detail/communicator.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using Communicator = detail::Communicator;

class CommunicatorMessage : public Message {
 public:
  explicit CommunicatorMessage(std::unique_ptr<Communicator::Transfer> transfer)
      : transfer_(std::move(transfer)) {}

  /// MPI has no wait with a time-out. Its calls carry all messages of the process on.
  void wait(std::chrono::milliseconds timeout) override {
    constexpr int kEager = 2000;
    constexpr std::chrono::microseconds kPause{20};
    const auto deadline = Clock::now() + timeout;
    for (int tries = 0; !transfer_->test(); ++tries) {
      if (aborted_) throw std::runtime_error("aborted");
      if (tries < kEager) {
        std::this_thread::yield();
        continue;
      }
      if (Clock::now() >= deadline) throw std::runtime_error("no message in time");
      std::this_thread::sleep_for(kPause);
    }
  }
  void abort() noexcept override { aborted_ = true; }

 private:
  std::unique_ptr<Communicator::Transfer> transfer_;
  std::atomic<bool> aborted_ = false;
};

class CommunicatorMailbox : public Mailbox {
 public:
  explicit CommunicatorMailbox(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  const char* name() const override { return "mpi"; }
  std::unique_ptr<Message> send(at::Tensor tensor, int to, int tag) override {
    return std::make_unique<CommunicatorMessage>(communicator_->send(std::move(tensor), to, tag));
  }
  std::unique_ptr<Message> receive(at::Tensor tensor, int from, int tag) override {
    return std::make_unique<CommunicatorMessage>(
        communicator_->receive(std::move(tensor), from, tag));
  }

 private:
  const std::shared_ptr<Communicator> communicator_;
};

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
