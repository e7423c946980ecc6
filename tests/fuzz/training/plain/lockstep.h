#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "fuzz/training/plain/training.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim/optimizer_state_dict.h"

namespace tessera::fuzz {

/// What one rank had after an event.
struct Seen {
  Record record;
  // For the next event of plain training, where values are rounded.
  ModuleStateDict weights = {};
  std::optional<OptimizerStateDict> state = {};  ///< After an event that may change it.
};

/// The optimizer's state may be another one after this event.
bool changes_state(const Item& event);

/// Plain training for cases with the option `wire`. Rounding errors grow from step to step, so
/// after each event plain training goes on from the weights and the optimizer state that the ranks
/// have. Then one event's rounding is all that may differ, and what is not rounded is equal.
class Lockstep {
 public:
  explicit Lockstep(const Case& which);

  /// Plays event number `i` and compares. `seen`: what each rank had. Empty: all is as it must be.
  std::string follow(const Item& wrapper, size_t i, const std::vector<Seen>& seen);

 private:
  enum class Bound { equal, near, finite, none };

  Bound bound_of(const std::string& name, const Item& wrapper, const Item& event) const;
  void measure(const Record& before, const Record& after);
  std::string gap(const std::string& name, const at::Tensor& actual, const at::Tensor& expected,
                  Bound bound) const;

  const Case& which_;
  PlainTraining plain_;
  double tolerance_ = 0;
  bool clips_ = false, sgd_ = false;
  std::set<std::string> buffers_;
  /// The largest change of a value in one event until now, by quantity.
  std::map<std::string, double> largest_;
};

}  // namespace tessera::fuzz
