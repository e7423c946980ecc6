#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/base/world.h"

namespace tessera::comm {

/// While alive, shows the other ranks of a group through its store that this rank's process runs,
/// and finds ranks whose processes do not. For waits that are longer than the time-out, because
/// ranks may be busy outside of collectives: messages cannot distinguish a busy rank from one that
/// is stopped or cut off.
///
/// All ranks make the same objects one after the other. A rank writes a number that grows, once a
/// `beat()`, and looks at those of the ranks in watched_by(). An object that lives for less than a
/// beat costs two messages to the store.
class Liveness {
 public:
  struct Limits {
    std::chrono::milliseconds silence;  ///< A rank whose number stays the same for so long is lost.
    std::chrono::milliseconds entry;    ///< So is one that makes its object so much later.
  };
  /// Called at most once, on a thread of this object. `lost`: the ranks that are lost; none if the
  /// store itself has not answered for Limits::silence.
  using OnLoss = std::function<void(const std::vector<int>& lost)>;

  /// `number`: of the object on its rank, from 1. `store` is not null.
  Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int64_t number, Limits limits,
           OnLoss on_loss);
  /// Tells the other ranks that this one does not wait any longer. Blocks while OnLoss runs, and
  /// otherwise at most a second, whatever the state of the store.
  ~Liveness();
  Liveness(const Liveness&) = delete;

  /// True if the rank, or the store, has been silent for half the limit.
  bool is_silent(int rank) const;
  /// True if this process itself did not run for half the limit.
  bool was_paused() const;

  /// An eighth of the limit, and at most half a second: a rank is lost when it has been silent for
  /// the limit, give or take a beat.
  static std::chrono::milliseconds beat(std::chrono::milliseconds silence);
  /// The ranks that `rank` looks at: up to eight that follow it, then those at distances that are
  /// powers of two, from which it receives when small values are gathered. In larger groups the
  /// others learn of a loss from these.
  static std::vector<int> watched_by(int rank, int size);

 private:
  struct State;
  static void show_and_look(State& state);
  void judge();

  std::shared_ptr<State> state_;
  OnLoss on_loss_;
  std::thread store_thread_;  // calls the store, which may block for ever
  std::thread judge_;         // never does, so it finds that too
};

/// The Liveness objects of a group, one after the other. begin() and end() are of one thread; the
/// others are of any.
class LivenessPeriods {
 public:
  explicit LivenessPeriods(const World& world);

  /// Does nothing without a store.
  void begin(Liveness::Limits limits, Liveness::OnLoss on_loss);
  void end();
  /// Null: there is none now.
  std::shared_ptr<Liveness> current();
  /// The limit of the last one; before it the time-out.
  std::chrono::milliseconds silence() const { return silence_; }

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_, size_;
  int64_t count_ = 0;
  std::atomic<std::chrono::milliseconds> silence_;
  std::mutex mutex_;  // guards current_
  std::shared_ptr<Liveness> current_;
};

}  // namespace tessera::comm
