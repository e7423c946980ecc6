#include "fuzz/training/plain/lockstep.h"

#include <algorithm>

#include <fmt/format.h>

#include "fuzz/training/expectation.h"
#include "fuzz/training/wire.h"

namespace tessera::fuzz {
namespace {

/// Rounding may change a value by this part of the largest change that an event has made. int8 has
/// 127 steps for the largest value of a block. A host's sums may be several times as large as the
/// mean, several hosts' errors add up, and so do those of the step before. A gradient that is lost
/// or summed twice changes the largest value by its whole change.
constexpr double kPart = 0.7;
/// The same of a mean of squares.
constexpr double kPartOfSquares = 2;

bool starts_with(const std::string& text, const std::string& begin) {
  return text.rfind(begin, 0) == 0;
}

bool is_weight(const std::string& name) { return starts_with(name, "weight "); }
bool is_state(const std::string& name) { return starts_with(name, "state "); }

/// "weight", or the optimizer's name of a state tensor.
std::string quantity(const std::string& name) {
  return is_weight(name) ? "weight" : name.substr(name.rfind(' ') + 1);
}

bool all_finite(const std::vector<Record>& records) {
  return std::all_of(records.begin(), records.end(), [](const Record& record) {
    return std::all_of(record.begin(), record.end(), [](const auto& item) {
      return item.second.isfinite().all().template item<bool>();
    });
  });
}

/// What ranks have of a value that plain training has the same of on all ranks is bitwise equal.
std::string unequal_ranks(const std::vector<Record>& actual, const std::vector<Record>& expected) {
  const std::map<std::string, at::Tensor> plain(expected[0].begin(), expected[0].end()),
      first(actual[0].begin(), actual[0].end());
  for (size_t rank = 1; rank < actual.size(); ++rank) {
    const std::map<std::string, at::Tensor> own(actual[rank].begin(), actual[rank].end());
    for (const auto& [name, value] : expected[rank]) {
      if (!is_weight(name) && !is_state(name)) continue;
      const auto there = plain.find(name), here = own.find(name), other = first.find(name);
      if (there == plain.end() || here == own.end() || other == first.end()) continue;
      if (!difference({{name, value}}, {{name, there->second}}, 0).empty()) continue;
      const auto text = difference({{name, here->second}}, {{name, other->second}}, 0);
      if (!text.empty()) return fmt::format("rank {} and rank 0: {}", rank, text);
    }
  }
  return "";
}

}  // namespace

bool changes_state(const Item& event) {
  return event.kind == "step" || event.kind == "join" || event.kind == "move";
}

Lockstep::Lockstep(const Case& which)
    : which_(which),
      plain_(which),
      tolerance_(tolerance_of(which)),
      clips_(std::any_of(which.story.begin(), which.story.end(),
                         [](const Item& event) { return event.has("clip"); })),
      sgd_(which.optimizer.kind == "SGD") {
  for (const auto& item : plain_.net().named_buffers()) buffers_.insert(item.key());
}

Lockstep::Bound Lockstep::bound_of(const std::string& name, const Item& wrapper,
                                   const Item& event) const {
  // FSDP computes with rounded parameters. Those of ZeroRedundancyOptimizer are the weights.
  const auto computed =
      wrapper.kind == "fsdp" && wrapper.has("wire_parameters") ? Bound::finite : Bound::equal;
  // An evaluation behind the step computes with weights that were rounded in it.
  const bool behind = event.kind == "step" && event.flag("then_evaluate") && name == "output";
  if (!is_weight(name) && !is_state(name))
    return starts_with(name, "norm") || behind ? Bound::finite : computed;
  if (event.kind != "step" && event.kind != "join") return Bound::equal;
  if (event.kind == "join") return Bound::finite;  // several steps
  if (is_weight(name) && buffers_.count(name.substr(std::string("weight ").size())))
    return computed;
  if (is_state(name) && quantity(name) == "step") return Bound::equal;
  // Clipping makes the changes smaller, and not what rounding took from the gradients before.
  if (clips_) return Bound::finite;
  // Adam makes a whole step of a gradient that is nothing but rounding.
  return is_weight(name) && !sgd_ ? Bound::finite : Bound::near;
}

void Lockstep::measure(const Record& before, const Record& after) {
  const std::map<std::string, at::Tensor> old(before.begin(), before.end());
  for (const auto& [name, value] : after) {
    const bool parameter = is_weight(name) && at::isFloatingType(value.scalar_type()) &&
                           !buffers_.count(name.substr(std::string("weight ").size()));
    if ((!parameter && !is_state(name)) || value.numel() == 0) continue;
    const auto found = old.find(name);
    const auto now = value.to(at::kDouble);
    const auto change = found == old.end() ? now : now - found->second.to(at::kDouble);
    auto& largest = largest_[quantity(name)];
    largest = std::max(largest, change.abs().max().item<double>());
  }
}

std::string Lockstep::gap(const std::string& name, const at::Tensor& actual,
                          const at::Tensor& expected, Bound bound) const {
  if (bound == Bound::none) return "";
  if (bound == Bound::equal) return difference({{name, actual}}, {{name, expected}}, tolerance_);
  if (actual.sizes() != expected.sizes() || actual.scalar_type() != expected.scalar_type())
    return name + " has another shape or dtype";
  const auto here = actual.to(at::kDouble), there = expected.to(at::kDouble);
  if ((there.isfinite() & here.isfinite().logical_not()).any().item<bool>())
    return name + " is not finite";
  if (bound == Bound::finite) return "";
  const auto what = quantity(name);
  const auto found = largest_.find(what);
  const double part = what.find("sq") == std::string::npos ? kPart : kPartOfSquares;
  const double allowed = found == largest_.end() ? 0 : part * found->second;
  const auto limit = allowed + std::max(tolerance_, 1e-5) * (1 + there.abs());
  const auto far = ((here - there).abs() > limit);
  if (!far.any().item<bool>()) return "";
  return fmt::format("{} is {} away from plain training; expected at most {}", name,
                     (here - there).abs().max().item<double>(), allowed);
}

std::string Lockstep::follow(const Item& wrapper, size_t i, const std::vector<Seen>& seen) {
  auto event = which_.story[i];
  const auto number = static_cast<int>(i);
  if (!rounds(wrapper)) {
    auto expected = plain_.play(event, number);
    plain_.add_results(event, expected);
    for (size_t rank = 0; rank < seen.size(); ++rank) {
      const auto text = difference(seen[rank].record, expected[rank], tolerance_);
      if (!text.empty()) return fmt::format("rank {}: {}", rank, text);
    }
    return "";
  }
  event.values.erase("state");
  if (changes_state(event)) event.values["state"] = "1";
  std::vector<Record> before(static_cast<size_t>(plain_.world()));
  plain_.add_results(event, before);
  auto expected = plain_.play(event, number);
  plain_.add_results(event, expected);
  std::vector<Record> actual;
  for (const auto& [record, weights, state] : seen) {
    auto& mine = actual.emplace_back();
    for (const auto& item : record)
      if (!is_weight(item.first) && !is_state(item.first)) mine.push_back(item);
    add_weights(mine, weights);
    if (state) add_state(mine, *state);
  }
  // A value that is not finite makes its whole block NaN.
  const bool sound = all_finite(before) && all_finite(expected) &&
                     !(event.has("nan") && event.number("nan") < plain_.world());
  if (sound && event.kind != "move")
    for (size_t rank = 0; rank < expected.size(); ++rank) measure(before[rank], expected[rank]);
  for (size_t rank = 0; rank < expected.size(); ++rank) {
    std::map<std::string, at::Tensor> found(actual[rank].begin(), actual[rank].end());
    for (const auto& [name, value] : expected[rank]) {
      const auto at = found.find(name);
      if (at == found.end()) return fmt::format("rank {}: {} is missing", rank, name);
      const auto text =
          gap(name, at->second, value, sound ? bound_of(name, wrapper, event) : Bound::none);
      if (!text.empty()) return fmt::format("rank {}: {}", rank, text);
      found.erase(at);
    }
    if (!found.empty())
      return fmt::format("rank {}: plain training has no {}", rank, found.begin()->first);
  }
  const auto unequal = unequal_ranks(actual, expected);
  if (!unequal.empty()) return unequal;
  for (size_t rank = 0; rank < seen.size(); ++rank)
    plain_.adopt(static_cast<int>(rank), seen[rank].weights, seen[rank].state);
  return "";
}

}  // namespace tessera::fuzz
