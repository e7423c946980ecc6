#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace tessera::fsdp {

enum class Phase : uint8_t { forward, backward };

/// The order in which units are used in a step, recorded in one and consulted in the next. Pure.
class UseOrder {
 public:
  static constexpr size_t kNever = std::numeric_limits<size_t>::max();

  explicit UseOrder(size_t units = 0) : recorded_at_(units) {}

  /// Returns whether this is another unit, or another phase, than the last.
  bool touch(size_t unit, Phase phase) {
    const Use use{unit, phase};
    if (use == last_) return false;
    advance(use);
    return true;
  }
  /// What was touched since the last call is now the record.
  void end_step();

  /// The unit that the record has after the last one touched, in that one's phase.
  std::optional<size_t> next() const;
  /// Whether the step goes the way of the record, so that next_use() is more than a guess.
  bool knows_rest() const { return !lost_; }
  /// Uses of other units until `unit` comes again, by the record; kNever when it does not, or when
  /// the step goes another way than the record.
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
  Use last_{kNever, Phase::forward};              // touched in this step
  std::vector<std::vector<size_t>> recorded_at_;  // by unit, ascending
  size_t cursor_ = 0;                             // behind the last touched, in the record
  bool lost_ = true;
};

}  // namespace tessera::fsdp
