#pragma once

#include <functional>
#include <utility>

#pragma GCC visibility push(default)
namespace tessera {

/// Returned by the wrappers' no_sync(). While it is alive, backward passes accumulate gradients
/// locally and send nothing. Scopes may be nested and moved: gradients are sent again when the last
/// one of the wrapper has ended. Local, but all ranks must use it in the same way. The wrapper must
/// outlive it.
class NoSync {
 public:
  /// Changes the number of scopes that the wrapper has.
  using Hold = std::function<void(int change)>;

  explicit NoSync(Hold hold) : hold_(std::move(hold)) { hold_(1); }
  ~NoSync() { end(); }
  /// The object that was moved from has no effect any more.
  NoSync(NoSync&& other) noexcept : hold_(std::exchange(other.hold_, nullptr)) {}
  NoSync& operator=(NoSync&& other) noexcept {
    if (this == &other) return *this;
    end();
    hold_ = std::exchange(other.hold_, nullptr);
    return *this;
  }

 private:
  void end() {
    if (const auto hold = std::exchange(hold_, nullptr)) hold(-1);
  }

  Hold hold_;
};

}  // namespace tessera
#pragma GCC visibility pop
