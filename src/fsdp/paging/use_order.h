#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace tessera::fsdp {

enum class Phase : uint8_t { forward, backward };

/// The order in which units are used in a step. The order of one step predicts the next. Pure: no
/// tensors, no communication.
class UseOrder {
 public:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  explicit UseOrder(size_t units = 0) : recorded_at_(units) {}

  /// Notes a use of `unit`. Returns whether unit or phase differs from those of the last call.
  bool touch(size_t unit, Phase phase) {
    const Use use{unit, phase};
    if (use == last_) return false;
    advance(use);
    return true;
  }
  /// Makes the uses since the last call the record for the next step.
  void end_step();

  /// The unit of the use after the last touched one in the record, or with `distance` of a later
  /// one. Nullopt behind the end of the phase.
  std::optional<size_t> next(size_t distance = 0) const;
  /// True if the step has followed the record so far, so that next_use() predicts.
  bool follows_record() const { return !lost_; }
  /// Number of uses before the next use of `unit` in the record; kNever if there is none, or if the
  /// step does not follow the record.
  size_t next_use(size_t unit) const;

 private:
  struct Use {
    size_t unit;
    Phase phase;
    bool operator==(const Use&) const = default;
  };
  void advance(const Use& use);
  void find(const Use& use);

  std::vector<Use> current_, recorded_;
  Use last_{kNever, Phase::forward};              // the last touched in this step
  std::vector<std::vector<size_t>> recorded_at_;  // by unit, ascending
  size_t cursor_ = 0;                             // position in the record behind the last touched
  bool lost_ = true;                              // the step does not follow the record
};

}  // namespace tessera::fsdp
