#include "comm/p2p/liveness.h"

#include <algorithm>
#include <condition_variable>
#include <map>
#include <sstream>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "comm/base/sigpipe_blocked.h"
#include "tessera/detail/classic.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr int64_t kLeft = -1;  // in place of a count of beats

std::string heartbeat_key(int rank) { return "running/" + std::to_string(rank); }

}  // namespace

struct Liveness::State {
  /// The value that a rank writes: the number of its object, and its beats or kLeft.
  struct Pulse {
    int64_t number = 0, beats = 0;
  };

  /// The last value of another rank, and its time.
  struct Seen {
    bool has_key = false, entered = false, left = false;
    int64_t beats = 0;
    Clock::time_point changed, read;
  };

  State(c10::intrusive_ptr<c10d::Store> of_group, int own_rank, int64_t own_number, Limits own)
      : store(std::move(of_group)), rank(own_rank), number(own_number), limits(own) {}

  const c10::intrusive_ptr<c10d::Store> store;
  const int rank;
  const int64_t number;
  const Limits limits;
  std::mutex mutex;  // guards what follows
  std::condition_variable wake;
  bool ending = false, ended = false, paused = false;
  Clock::time_point answered = Clock::now(), judged = answered;
  std::map<int, Seen> others;

  void write(int64_t beats) {
    const auto text = fmt::format("{} {}", number, beats);
    store->set(heartbeat_key(rank), std::vector<uint8_t>(text.begin(), text.end()));
    std::lock_guard lock(mutex);
    answered = Clock::now();
  }

  Pulse read(int other, bool has_key) {
    if (!has_key && !store->check({heartbeat_key(other)})) return {};
    const auto bytes = store->get(heartbeat_key(other));
    detail::Classic<std::istringstream> text(std::string(bytes.begin(), bytes.end()));
    Pulse pulse;
    text >> pulse.number >> pulse.beats;
    return pulse;
  }

  void look_at(int other) {
    bool has_key = false;
    {
      std::lock_guard lock(mutex);
      if (others[other].left) return;
      has_key = others[other].has_key;
    }
    const auto pulse = read(other, has_key);
    std::lock_guard lock(mutex);
    auto& seen = others[other];
    answered = seen.read = Clock::now();
    seen.has_key = pulse.number > 0;
    if (pulse.number < number) return;  // it has not come yet
    seen.left = pulse.number > number || pulse.beats == kLeft;
    if (seen.entered && pulse.beats == seen.beats) return;
    seen.entered = true;
    seen.beats = pulse.beats;
    seen.changed = seen.read;
  }

  /// The time in which this process did not run says nothing about the others.
  void forgive(Clock::duration gap) {
    paused = paused || gap >= limits.silence / 2;
    answered += gap;
    for (auto& [other, seen] : others) seen.changed += gap;
  }

  bool is_silent(int other, std::chrono::milliseconds silence, std::chrono::milliseconds entry) {
    const auto found = others.find(other);
    if (found == others.end() || found->second.left) return false;
    const auto& seen = found->second;
    return seen.read - seen.changed >= (seen.entered ? silence : entry);
  }
};

Liveness::Liveness(c10::intrusive_ptr<c10d::Store> store, int rank, int size, int64_t number,
                   Limits limits, OnLoss on_loss)
    : state_(std::make_shared<State>(std::move(store), rank, number, limits)),
      on_loss_(std::move(on_loss)) {
  for (const int other : watched_by(rank, size))
    state_->others[other].changed = state_->others[other].read = state_->answered;
  const SigpipeBlocked inherited;
  store_thread_ = std::thread([state = state_] { show_and_look(*state); });
  judge_ = std::thread([this] { judge(); });
}

Liveness::~Liveness() {
  std::unique_lock lock(state_->mutex);
  state_->ending = true;
  state_->wake.notify_all();
  lock.unlock();
  judge_.join();
  lock.lock();
  const bool answers = Clock::now() - state_->answered < state_->limits.silence / 2;
  const bool ended =
      state_->wake.wait_for(lock, answers ? 1s : 0s, [this] { return state_->ended; });
  lock.unlock();
  if (ended) store_thread_.join();
  else store_thread_.detach();
}

void Liveness::show_and_look(State& state) {
  const auto interval = beat(state.limits.silence);
  std::unique_lock lock(state.mutex);
  for (int64_t beats = 1; !state.ending; ++beats) {
    lock.unlock();
    try {
      state.write(beats);
      for (const auto& [other, seen] : state.others)  // this thread alone looks at all of them
        if (beats > 1) state.look_at(other);
    } catch (...) {  // the store has ended, or the limit of its own has passed
    }
    lock.lock();
    state.wake.wait_for(lock, interval, [&] { return state.ending; });
  }
  lock.unlock();
  try {
    state.write(kLeft);
  } catch (...) {
  }
  lock.lock();
  state.ended = true;
  state.wake.notify_all();
}

void Liveness::judge() {
  auto& state = *state_;
  const auto interval = beat(state.limits.silence) / 2;
  std::unique_lock lock(state.mutex);
  while (!state.wake.wait_for(lock, interval, [&] { return state.ending; })) {
    const auto now = Clock::now(), last = std::exchange(state.judged, now);
    if (now - last > 2 * interval) state.forgive(now - last);
    std::vector<int> lost;
    for (const auto& [other, seen] : state.others)
      if (state.is_silent(other, state.limits.silence, state.limits.entry)) lost.push_back(other);
    if (lost.empty() && now - state.answered < state.limits.silence) continue;
    lock.unlock();
    return on_loss_(lost);
  }
}

bool Liveness::is_silent(int rank) const {
  std::lock_guard lock(state_->mutex);
  const auto half = state_->limits.silence / 2;
  return Clock::now() - state_->answered >= half ||
         state_->is_silent(rank, half, state_->limits.entry / 2);
}

bool Liveness::was_paused() const {
  std::lock_guard lock(state_->mutex);
  return state_->paused || Clock::now() - state_->judged >= state_->limits.silence / 2;
}

std::chrono::milliseconds Liveness::beat(std::chrono::milliseconds silence) {
  return std::clamp<std::chrono::milliseconds>(silence / 8, 1ms, 500ms);
}

std::vector<int> Liveness::watched_by(int rank, int size) {
  std::vector<int> watched;
  for (int distance = 1; distance < size; ++distance)
    if (distance <= 8 || (distance & (distance - 1)) == 0)
      watched.push_back((rank + distance) % size);
  return watched;
}

LivenessPeriods::LivenessPeriods(const World& world)
    : store_(world.store), rank_(world.rank), size_(world.size), silence_(world.options.timeout) {}

void LivenessPeriods::begin(Liveness::Limits limits, Liveness::OnLoss on_loss) {
  if (!store_) return;
  silence_ = limits.silence;
  auto begun =
      std::make_shared<Liveness>(store_, rank_, size_, ++count_, limits, std::move(on_loss));
  std::lock_guard lock(mutex_);
  current_ = std::move(begun);
}

void LivenessPeriods::end() {
  std::shared_ptr<Liveness> ended;
  std::lock_guard lock(mutex_);
  ended.swap(current_);
}

std::shared_ptr<Liveness> LivenessPeriods::current() {
  std::lock_guard lock(mutex_);
  return current_;
}

}  // namespace tessera::comm
