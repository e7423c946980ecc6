#pragma once

#include <cstdint>
#include <deque>
#include <optional>

namespace tessera::train {

enum class Fault { none, loss, gradient, spike };
enum class Verdict { update, skip, roll_back, stop };

struct FaultRules {
  Verdict on_nonfinite = Verdict::stop;  ///< train.on_nonfinite
  std::optional<double> spike = {};      ///< train.rollback_on_spike: factor of the median
  int64_t most_skips = 10;               ///< in a row
  /// The update throws for a norm that is not finite, so it takes place after such a loss, too.
  bool norm_is_error = false;
  bool norm_may_overflow = false;  ///< with loss scaling: such a norm is no fault
};

struct Decision {
  Fault fault = Fault::none;
  Verdict verdict = Verdict::update;
};

/// Decides from the mean loss and the norm of each step, which are the same on all ranks, whether
/// the parameters are updated and the run continues. Local; depends on nothing else.
class FaultPolicy {
 public:
  explicit FaultPolicy(FaultRules rules = {}) : rules_(rules) {}

  /// Between backward and update: returns whether to update.
  bool may_update(double loss) const;
  /// After the update, once for each step.
  Decision decide(double loss, double norm);

  const FaultRules& rules() const { return rules_; }
  double median() const;  ///< of the losses of the last good steps
  size_t losses() const { return recent_.size(); }

 private:
  Fault fault_of(double loss) const;

  FaultRules rules_;
  std::deque<double> recent_;
  int64_t skips_ = 0;  // in a row
};

}  // namespace tessera::train
