#include "fuzz/training/expectation.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "fuzz/training/wire.h"

namespace tessera::fuzz {
namespace {

/// An error in one event must show in the next step, which one event may precede.
constexpr size_t kLatestEvent = 4;

bool has_layer(const Case& which, const std::string& kind, bool frozen_too = false) {
  return std::any_of(which.layers.begin(), which.layers.end(), [&](const Item& layer) {
    return layer.kind == kind && (frozen_too || !layer.flag("frozen"));
  });
}

/// The numbers of the parts that are frozen during event `i`, and of those that are frozen at
/// construction and thawed later.
struct Trainability {
  std::set<size_t> frozen, thawed;
};

Trainability trainability(const Case& which, size_t i) {
  Trainability result;
  const auto part = [&](const Item& event) {
    return static_cast<size_t>(event.number("part", event.number("thaws"))) %
           (which.layers.size() + 1);
  };
  for (size_t k = 0; k <= i; ++k) {
    const auto& event = which.story[k];
    if (event.kind == "move") result = {};  // makes the model again
    if (event.kind == "freeze") result.frozen.insert(part(event));
    if (event.kind != "thaw" && (!event.has("thaws") || k == i)) continue;
    result.frozen.erase(part(event));
    if (part(event) < which.layers.size() && which.layers[part(event)].flag("frozen"))
      result.thawed.insert(part(event));
  }
  return result;
}

/// Some trainable parameter gets no gradient in event `i`, on any rank or on some.
bool leaves_unused(const Case& which, size_t i) {
  const auto now = trainability(which, i);
  const bool some_branches = which.story[i].text("branch", "all") != "all";
  for (size_t part = 0; part < which.layers.size(); ++part) {
    const auto& layer = which.layers[part];
    const bool trains =
        (!layer.flag("frozen") || now.thawed.count(part)) && !now.frozen.count(part);
    const bool unused = layer.kind == "unused" || layer.kind == "tied" || layer.kind == "experts" ||
                        (layer.kind == "conditional" && some_branches);
    if (trains && unused) return true;
  }
  return false;
}

/// All parameters that the wrapper has are frozen during event `i`.
bool trains_nothing(const Case& which, const Item& wrapper, size_t i) {
  const auto parts = which.layers.size() + 1;
  const bool added = std::any_of(which.story.begin(), which.story.begin() + i,
                                 [](const Item& event) { return event.kind == "add_group"; });
  const auto late = added ? -1 : wrapper.number("late_part", -1);
  const auto now = trainability(which, i);
  for (size_t part = 0; part < parts; ++part) {
    const bool from_the_start =
        part < which.layers.size() && which.layers[part].flag("frozen") && !now.thawed.count(part);
    const bool absent = (late >= 0 && static_cast<size_t>(late) % parts == part) ||
                        wrapper.number("ignored", -1) == static_cast<int64_t>(part);
    if (!absent && !from_the_start && !now.frozen.count(part)) return false;
  }
  return true;
}

Expectation of_step(const Case& which, const Item& wrapper, int world, size_t i) {
  const auto& event = which.story[i];
  const auto& kind = wrapper.kind;
  if (event.has("trap"))
    return event.number("trap_rank", -1) >= 0 ? Expectation::own_error
                                              : Expectation::equal_or_error;
  if (event.has("absent") && event.number("absent") < world) {
    if (wrapper.flag("shard_gradients")) return Expectation::equal_or_error;
    if (world > 1 && kind != "zero") return Expectation::usage_error;
  }
  // libtorch's attention takes another way when its three inputs differ, and NaN differs from NaN.
  if (event.has("nan") && kind == "fsdp" &&
      (has_layer(which, "attention", true) || has_layer(which, "encoder", true)))
    return Expectation::equal_or_error;
  // Another use of the parameters than in the first step breaks the promise.
  if (wrapper.flag("static_graph") && (event.flag("retain") || event.flag("penalty")))
    return Expectation::equal_or_error;
  const auto trainable = trainability(which, i);
  const bool needs_all = (kind == "ddp" || kind == "ddp_zero") && !wrapper.flag("find_unused");
  if (needs_all && leaves_unused(which, i))
    return world > 1 ? Expectation::usage_error : Expectation::equal_or_error;
  // Gradients of thawed parameters are not among those of the shards yet.
  if (!trainable.thawed.empty() && wrapper.flag("shard_gradients") &&
      (event.has("scaled") || event.has("scaler")))
    return Expectation::equal_or_error;
  // These gradients are for step().
  if (event.has("replaced") && wrapper.flag("shard_gradients")) return Expectation::equal_or_error;
  // Where all parameters were frozen, the first step after a thaw needs the wrapper's backward().
  if (wrapper.flag("own_backward") && wrapper.has("late_part") && !trainable.thawed.empty())
    return Expectation::equal_or_error;
  // A closure clears gradients that step() has used up after the new partition.
  if (event.has("closure") && wrapper.flag("in_place") && !trainable.thawed.empty())
    return Expectation::equal_or_error;
  if (event.flag("uncleared")) {
    // An update in one pass leaves gradients as they are.
    const bool lost = world > 1 && wrapper.text("reduce") == "sum" && trainable.frozen.empty();
    const bool none = !wrapper.flag("in_place") && wrapper.text("reduce") != "sum";
    return lost   ? Expectation::usage_error
           : none ? Expectation::equal
                  : Expectation::equal_or_error;
  }
  const int syncs = event.flag("no_sync") ? 1 : event.number("micro", 1);
  if (syncs * (event.flag("retain") ? 2 : 1) > 1) {
    if (wrapper.text("reduce") == "sum" && world > 1) return Expectation::usage_error;
  }
  // libtorch notices a parameter that has changed since forward, depending on the optimizer.
  if (event.flag("kept_graph")) return Expectation::equal_or_any_error;
  if (event.flag("penalty")) return Expectation::equal_or_error;
  return Expectation::equal;
}

std::string list(const std::vector<Outcome>& outcomes) {
  std::string text;
  static const char* const names[] = {"no error", "difference",       "UsageError",
                                      "an Error", "the user's error", "a foreign exception"};
  for (size_t rank = 0; rank < outcomes.size(); ++rank)
    text += fmt::format("\n  rank {}: {} {}", rank, names[static_cast<int>(outcomes[rank].kind)],
                        outcomes[rank].text.substr(0, 400));
  return text;
}

}  // namespace

bool is_error(Expectation expectation) {
  return expectation == Expectation::usage_error || expectation == Expectation::own_error ||
         expectation == Expectation::any_error;
}

namespace {

Expectation of_event(const Case& which, const Item& wrapper, int world, size_t i) {
  const auto& event = which.story[i];
  if (event.kind == "step") {
    const auto due = of_step(which, wrapper, world, i);
    // libtorch itself may notice that a parameter has changed since the forward of a kept graph.
    return due == Expectation::equal_or_error && event.flag("kept_graph")
               ? Expectation::equal_or_any_error
               : due;
  }
  if (event.kind == "join") {
    const bool other_use = wrapper.flag("static_graph") && event.flag("penalty");
    if (wrapper.flag("local_group") || other_use) return Expectation::equal_or_error;
    if (!trainability(which, i).frozen.empty() || !trainability(which, i).thawed.empty())
      return Expectation::equal_or_error;
    const bool needs_all =
        (wrapper.kind == "ddp" || wrapper.kind == "ddp_zero") && !wrapper.flag("find_unused");
    if (leaves_unused(which, i) && needs_all) return Expectation::equal_or_error;
    return Expectation::equal;
  }
  // Without sharding, and for units that are gathered already, a forward is local.
  if (event.kind == "evaluate" && event.has("rank") && wrapper.kind == "fsdp" && world > 1)
    return Expectation::equal_or_error;
  if (event.kind == "lr" && event.has("rank") && world > 1) return Expectation::usage_error;
  // Before it makes new packs, a sum over the ranks that was not cleared is an error.
  if (event.kind == "thaw" && wrapper.text("reduce") == "sum") return Expectation::equal_or_error;
  // A part without parameters is no group.
  if (event.kind == "add_group") {
    const auto part = static_cast<size_t>(wrapper.number("late_part")) % (which.layers.size() + 1);
    const bool empty = part < which.layers.size() && which.layers[part].flag("plain");
    // Where step() uses up gradients, zero_grad() must come before a new partition.
    const bool used_up = wrapper.flag("in_place");
    return empty || used_up || !wrapper.has("late_part") ? Expectation::equal_or_error
                                                         : Expectation::equal;
  }
  if (event.kind == "to_dtype") {
    // A thawed parameter is taken as it is at the next forward, and a frozen one is not used.
    const auto now = trainability(which, i);
    const bool changed =
        std::any_of(which.story.begin(), which.story.begin() + i,
                    [](const Item& past) { return past.kind == "thaw" || past.has("thaws"); });
    return changed || !now.frozen.empty() ? Expectation::equal_or_error : Expectation::usage_error;
  }
  return Expectation::equal;
}

}  // namespace

Expectation expectation(const Case& which, const Item& wrapper, int world, size_t i,
                        bool plain_throws) {
  const bool constructs = i == 0 || which.story[i].kind == "move";
  if (constructs && refuses_wire(which, wrapper, world)) return Expectation::usage_error;
  if (plain_throws) return Expectation::any_error;
  const auto due = of_event(which, wrapper, world, i);
  // A mistake shows where ranks meet, which they do not while the wrapper trains nothing.
  const bool idle = trains_nothing(which, wrapper, i);
  return due == Expectation::usage_error && idle ? Expectation::equal_or_error : due;
}

double tolerance_of(const Case& which) {
  const auto& optimizer = which.optimizer.kind;
  bool exact = optimizer == "SGD" || optimizer == "Adam" || optimizer == "AdamW";
  const auto rounds = [](const Item& item) {
    return item.text("strategy") == "hybrid" || item.text("clip") == "norm";
  };
  // libtorch rounds 16-bit numbers otherwise at the ends of tensors, and shards end elsewhere.
  // libtorch 2 does so where shards do not end, too.
  if (has_layer(which, "bfloat16_layer", true) || has_layer(which, "half_layer", true)) return 0.03;
  const auto mixed = [](const Item& item) { return item.has("mixed"); };
  if (mixed(which.wrapper) || std::any_of(which.story.begin(), which.story.end(), mixed))
    return 0.02;
  // FSDP does not expect the gradients of thawed parameters in their first backward. It then
  // reduces those of no_sync() and those of this backward one after the other: the same terms, in
  // another order.
  const auto is_fsdp = [](const Item& item) {
    return item.kind == "fsdp" || item.text("wrapper") == "fsdp";
  };
  const auto any_event = [&](auto fits) {
    return std::any_of(which.story.begin(), which.story.end(), fits);
  };
  const bool thaws =
      any_event([](const Item& event) { return event.kind == "thaw" || event.has("thaws"); });
  const bool accumulates = any_event([](const Item& event) { return event.flag("no_sync"); });
  if (thaws && accumulates && (is_fsdp(which.wrapper) || any_event(is_fsdp))) exact = false;
  // ZeRO with shard_gradients adds the first gradients of thawed parameters before it reduces them.
  const auto shards = [](const Item& item) { return item.has("shard_gradients"); };
  const bool repeats = any_event([](const Item& event) {
    return event.has("micro") || event.has("retain") || event.has("uncleared");
  });
  if (thaws && repeats && (shards(which.wrapper) || any_event(shards))) exact = false;
  // libtorch's operators round complex products otherwise at the ends of tensors, and shards end
  // elsewhere.
  if (has_layer(which, "complex", true) && optimizer != "SGD") exact = false;
  // The gradients of several backwards are added row by row, or all rows of all of them at once.
  const bool sparse = std::any_of(which.layers.begin(), which.layers.end(),
                                  [](const Item& layer) { return layer.flag("sparse"); });
  if (sparse && repeats) exact = false;
  exact = exact && !rounds(which.wrapper) &&
          std::none_of(which.story.begin(), which.story.end(), rounds);
  if (exact) return 0;
  return which.dtype == "double" ? 1e-7 : 1e-4;
}

std::optional<Finding> judge(const std::vector<Expectation>& due, size_t first, size_t reached,
                             const std::vector<Outcome>& outcomes, double seconds, double limit,
                             bool groups) {
  using Kind = Outcome::Kind;
  const auto all = [&](auto accepts) {
    return std::all_of(outcomes.begin(), outcomes.end(),
                       [&](const Outcome& outcome) { return accepts(outcome.kind); });
  };
  size_t error_due = due.size();
  for (size_t i = 0; i < due.size() && error_due == due.size(); ++i)
    if (is_error(due[i])) error_due = i;
  if (all([](Kind kind) { return kind == Kind::none; })) {
    if (error_due == due.size()) return std::nullopt;
    return Finding{"no error",
                   fmt::format("event {} must be an error and is none", first + error_due)};
  }
  if (due.empty()) return Finding{"error", "before the first event" + list(outcomes)};
  // An error shows in the event in which it is due, or later, where ranks meet.
  const size_t last = std::min(reached - first, due.size() - 1);
  bool allowed = false, own = false, any = false, must = false, may = false;
  for (size_t i = 0; i <= last; ++i) {
    if (due[i] != Expectation::equal) allowed = true;
    if (due[i] == Expectation::equal_or_error) may = true;
    if (due[i] == Expectation::own_error) own = true;
    if (due[i] == Expectation::any_error || due[i] == Expectation::equal_or_any_error) any = true;
    if (due[i] == Expectation::usage_error) must = true;
  }
  // A rank may be ahead of the rank that waits for it, and throw there what libtorch throws.
  for (size_t i = last; i < std::min(last + kLatestEvent + 1, due.size()); ++i)
    if (due[i] == Expectation::any_error) any = true;
  const auto where = fmt::format("event {}:", reached);
  if (!allowed) return Finding{"error", where + list(outcomes)};
  const auto own_count =
      std::count_if(outcomes.begin(), outcomes.end(),
                    [](const Outcome& outcome) { return outcome.kind == Kind::own; });
  // The rank that throws may be one event ahead of the rank that waits for it.
  own = own || (own_count > 0 && std::count(due.begin(), due.end(), Expectation::own_error) > 0);
  if (own && ((!must && !may) || own_count > 0)) {
    // A rank that does not wait for the others may be ahead, where plain training throws.
    if (own_count != 1 || !all([&](Kind kind) {
          return kind == Kind::own || kind == Kind::usage || kind == Kind::broken ||
                 (any && kind == Kind::other);
        }))
      return Finding{"classes", where + list(outcomes)};
  } else if (any) {
    if (!all([](Kind kind) { return kind != Kind::none; }))
      return Finding{"classes", where + list(outcomes)};
  } else if (!all([&](Kind kind) {
               return kind == Kind::usage || (groups && kind == Kind::broken);
             })) {
    return Finding{"classes", where + list(outcomes)};
  }
  if (error_due < due.size() && reached > first + error_due + kLatestEvent)
    return Finding{"late",
                   fmt::format("{} due in event {}{}", where, first + error_due, list(outcomes))};
  if (seconds > limit)
    return Finding{"slow", fmt::format("{} {:.1f} s{}", where, seconds, list(outcomes))};
  return std::nullopt;
}

}  // namespace tessera::fuzz
