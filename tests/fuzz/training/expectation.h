#pragma once

#include <exception>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/training/case.h"
#include "fuzz/training/story.h"

namespace tessera::fuzz {

/// What must come of an event.
enum class Expectation {
  equal,               ///< As plain training.
  usage_error,         ///< A UsageError on every rank.
  own_error,           ///< The user's exception on the rank that threw it, an Error on all others.
  any_error,           ///< An exception on every rank, since libtorch throws too.
  equal_or_error,      ///< As plain training, or a UsageError on every rank.
  equal_or_any_error,  ///< As plain training, or an exception on every rank.
};

/// An error is due, and nothing else will do.
bool is_error(Expectation expectation);

/// How a rank ended.
struct Outcome {
  enum class Kind { none, difference, usage, broken, own, other } kind = Kind::none;
  std::string text;
};
Outcome outcome_of(const std::exception_ptr& error);

/// Of event number `i` of the story. `plain_throws`: libtorch alone throws in it.
Expectation expectation(const Case& which, const Item& wrapper, int world, size_t i,
                        bool plain_throws);

/// 0 where bits are promised.
double tolerance_of(const Case& which);

/// `due`: expectations of the events from `first` on; `reached`: the event in which the first rank
/// threw, or the end; `seconds`: the time from then to the end of the last rank. `groups`: the
/// ranks are divided into groups, and ranks of another group than the one with the error may see
/// only that a peer has left.
std::optional<Finding> judge(const std::vector<Expectation>& due, size_t first, size_t reached,
                             const std::vector<Outcome>& outcomes, double seconds, double limit,
                             bool groups);

}  // namespace tessera::fuzz
