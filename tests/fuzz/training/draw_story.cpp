#include "fuzz/training/draw_story.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace tessera::fuzz {
namespace {

Item random_step(Random& random, const Item& wrapper, const Limits& limits, int world,
                 const std::vector<Item>& layers) {
  Item event{"step"};
  auto& values = event.values;
  const bool sum = wrapper.text("reduce") == "sum";
  if (random.chance(limits.theme == Theme::accumulation ? 80 : 30)) {
    values["micro"] = random.pick({"2", "3"});
    const int held = limits.theme == Theme::accumulation ? 40 : 60;
    if (sum || random.chance(held)) values["no_sync"] = "1";
    else maybe(random, 20, values, "replaced", "0.5");
  }
  // Gradients that are cleared after a step are not cleared before the next one.
  if (limits.theme == Theme::trainability) maybe(random, 60, values, "when", "after");
  else if (random.chance(40)) values["when"] = random.pick({"after", "between"});
  maybe(random, 20, values, "zero", "module");
  if (random.chance(20)) {
    if (limits.norms) values["clip"] = "norm";
    else if (limits.value_clips) values["clip"] = "value";
  }
  if (has(layers, {"conditional", "experts"})) {
    const bool free = wrapper.kind == "zero" || wrapper.kind == "distributed_optimizer" ||
                      wrapper.kind == "fsdp" || wrapper.flag("find_unused");
    if (free) values["branch"] = random.pick({"all", "none", "rank0", "own", "turns"});
    if (free && limits.theme == Theme::accumulation) maybe(random, 50, values, "branch", "turns");
  }
  const int rare = limits.theme == Theme::accumulation ? 12 : 4;
  if (random.chance(8)) values["nan"] = std::to_string(random.below(world));
  if (random.chance(rare) && !limits.partly_used) {
    for (const auto* name : {"micro", "no_sync", "replaced"}) values.erase(name);
    values["retain"] = "1";
  }
  if (random.chance(rare)) {
    values["penalty"] = "1";
    // Two parts of a gradient may be added in another order; nothing is promised there.
    if (wrapper.kind == "fsdp") values.erase("no_sync");
  }
  if (random.chance(rare)) {
    values["kept_graph"] = "1";
    maybe(random, 50, values, "then_evaluate");
  }
  if (wrapper.kind != "distributed_optimizer" && random.chance(4) && wrapper.kind != "ddp_zero") {
    for (const auto* name : {"micro", "no_sync", "clip", "retain", "when", "replaced"})
      values.erase(name);
    values["closure"] = "1";
  }
  maybe(random, 25, values, "state");
  maybe(random, 15, values, "slow", std::to_string(random.below(world)));
  return event;
}

/// Events after which a story may end, because they are errors for some wrappers.
Item random_fault(Random& random, const Item& wrapper, int world) {
  const auto rank = std::to_string(random.below(world));
  switch (random.below(6)) {
    case 0:
      return {"step", {{"absent", rank}}};
    case 1:
      return {"step",
              {{"trap", random.pick({"forward", "backward", "hook"})}, {"trap_rank", rank}}};
    case 2:
      return {"step", {{"trap", random.pick({"forward", "backward", "hook"})}}};
    case 3:
      // The others leave the optimizer to the user.
      if (wrapper.kind != "ddp" && wrapper.kind != "fsdp") return {"lr", {{"rank", rank}}};
      return {"step", {{"absent", rank}}};
    case 4:
      return {"evaluate", {{"rank", rank}}};
    default:
      return {"to_dtype"};
  }
}

/// The part of an event that thaws: mostly one that is frozen.
std::string part_to_thaw(Random& random, const std::vector<Item>& layers,
                         const std::vector<Item>& story) {
  std::vector<std::string> frozen;
  for (size_t i = 0; i < layers.size(); ++i)
    if (layers[i].flag("frozen")) frozen.push_back(std::to_string(i));
  for (const auto& event : story)
    if (event.kind == "freeze") frozen.push_back(event.text("part"));
  if (frozen.empty() || random.chance(25)) return std::to_string(random.below(6));
  return frozen[random.below(static_cast<int>(frozen.size()))];
}

Item random_event(Random& random, const Item& wrapper, const Limits& limits, int world,
                  const Case& which) {
  const auto& layers = which.layers;
  const auto part = std::to_string(random.below(6));
  const bool thaws = limits.theme == Theme::trainability && random.chance(35);
  const bool joins = limits.theme == Theme::joins && random.chance(30);
  // What a forward has gathered is written to.
  const bool writes =
      !which.story.empty() && which.story.back().kind == "evaluate" && random.chance(30);
  const int die = thaws ? 65 + random.below(10) : joins ? 90 : writes ? 75 : random.below(93);
  if (die < 55) {
    auto event = random_step(random, wrapper, limits, world, layers);
    // Between backward and the update.
    if (limits.theme == Theme::trainability && !event.has("closure"))
      maybe(random, 20, event.values, "thaws", part_to_thaw(random, layers, which.story));
    return event;
  }
  if (die < 65) {
    Item event{"evaluate"};
    if (wrapper.kind != "fsdp")
      maybe(random, 50, event.values, "rank", std::to_string(random.below(world)));
    return event;
  }
  if (die < 70) return {"freeze", {{"part", part}}};
  if (die < 75) return {"thaw", {{"part", part_to_thaw(random, layers, which.story)}}};
  if (die < 80) return {"write", {{"part", part}}};
  if (die < 85) return {"lr", {{"factor", random.pick({"0.5", "2"})}}};
  Item event{"join"};
  std::string counts;
  for (int rank = 0; rank < 4; ++rank) counts += static_cast<char>('0' + random.below(4));
  event.values["batches"] = counts;
  maybe(random, 30, event.values, "by_active");
  maybe(random, 10, event.values, "penalty");
  return event;
}

bool is_plain_step(const Item& event) {
  static const std::set<std::string> others = {"closure", "clip",       "nan",  "retain",
                                               "penalty", "kept_graph", "when", "thaws"};
  return event.kind == "step" &&
         std::none_of(event.values.begin(), event.values.end(),
                      [](const auto& value) { return others.count(value.first) > 0; });
}

/// A step that adds to the gradients of the step before it, where that is no error.
void add_to_gradients(Random& random, Theme theme, Case& which) {
  Item wrapper = which.wrapper;
  for (size_t i = 0; i + 1 < which.story.size(); ++i) {
    auto& next = which.story[i + 1];
    if (next.kind == "move") wrapper = {next.text("wrapper"), next.values};
    const bool used_up = wrapper.flag("in_place") || wrapper.text("reduce") == "sum";
    if (used_up || !is_plain_step(which.story[i]) || !is_plain_step(next)) continue;
    if (which.story[i].has("uncleared")) continue;
    maybe(random, theme == Theme::accumulation ? 40 : 5, next.values, "uncleared");
  }
}

/// What ends a story: an error for some wrappers, or for all.
void add_end(Random& random, Theme theme, const Item& wrapper, int world, Case& which) {
  auto& story = which.story;
  // Values that are not finite hide what comes after them.
  for (size_t i = 0; i < story.size(); ++i)
    if (i + 4 < story.size()) story[i].values.erase("nan");
  // Where gradients of two steps must not be added up.
  const bool clears = wrapper.flag("in_place") || wrapper.text("reduce") == "sum";
  if (clears && random.chance(40)) {
    story.push_back({"step"});
    story.push_back({"step", {{"uncleared", "1"}}});
    if (random.chance(50)) story.back().values.insert({{"micro", "2"}, {"no_sync", "1"}});
    return;
  }
  // What ranks do to a group that is not synchronized is their own affair.
  if (wrapper.flag("local_group") || !random.chance(theme == Theme::faults ? 95 : 50)) return;
  story.push_back(random_fault(random, wrapper, world));
  for (int time = 0; time < 2; ++time) story.push_back({"step"});
}

/// The body of the story. Returns the last wrapper and its world.
std::pair<Item, int> add_events(Random& random, const Limits& limits, Case& which) {
  Item wrapper = which.wrapper;
  int world = which.world;
  const int events = limits.theme == Theme::faults ? 1 + random.below(4) : 8 + random.below(25);
  bool late = wrapper.has("late_part");
  for (int i = 0; i < events; ++i) {
    if (late && random.chance(25)) {
      which.story.push_back({"add_group"});
      late = false;
    } else if (!late && limits.moves && random.chance(limits.theme == Theme::states ? 20 : 5)) {
      world = random.pick({1, 2, 3, 4});
      const bool groups = wrapper.has("groups"), folder = random.chance(50);
      wrapper = random_wrapper(random, limits, world);
      wrapper.values.erase("late_part");
      if (!folder) {  // a state dict has the parameter groups
        wrapper.values.erase("groups");
        wrapper.values.erase("local_group");
        if (groups) wrapper.values["groups"] = "2";
      }
      Item event{"move", wrapper.values};
      event.values["wrapper"] = wrapper.kind;
      event.values["world"] = std::to_string(world);
      if (folder) event.values["folder"] = "1";
      which.story.push_back(event);
    } else {
      which.story.push_back(random_event(random, wrapper, limits, world, which));
    }
  }
  return {wrapper, world};
}

}  // namespace

void add_story(Random& random, const Limits& limits, Case& which) {
  const auto [wrapper, world] = add_events(random, limits, which);
  add_to_gradients(random, limits.theme, which);
  add_end(random, limits.theme, wrapper, world, which);
}

}  // namespace tessera::fuzz
