#include "fuzz/training/vary.h"

#include "fuzz/training/wire.h"

namespace tessera::fuzz {
namespace {

/// Divides some cases into groups that train apart. What a parameter is to a group must be the same
/// for all of them, and events that concern all ranks at once are left out.
void divide_into_groups(Random& random, Case& which) {
  auto& values = which.wrapper.values;
  if (which.world == 1 || !random.chance(10)) return;
  for (const char* name : {"late_part", "ignored", "local_group", "hosts"})
    if (values.count(name)) return;
  if (which.wrapper.text("strategy") == "hybrid") return;
  // What was frozen at construction is synchronised by some wrappers. LocalSgd computes in the
  // widest dtype of the parameters.
  const auto differs = [&](const Item& layer) {
    const bool widens = layer.kind == "double_layer" && which.dtype == "float";
    return is_short(layer) || widens || layer.flag("frozen");
  };
  if (std::any_of(which.layers.begin(), which.layers.end(), differs)) return;
  std::vector<Item> story;
  for (auto& event : which.story) {
    if (event.kind == "move") break;  // what follows was chosen for another wrapper
    const bool fits = event.kind == "step" || event.kind == "evaluate" || event.kind == "write" ||
                      event.kind == "freeze" || (event.kind == "lr" && !event.has("rank"));
    if (!fits) continue;
    for (const char* name : {"absent", "trap", "trap_rank", "nan"}) event.values.erase(name);
    if (event.kind == "evaluate") event.values.erase("rank");
    if (event.text("branch") == "rank0" || event.text("branch") == "own")
      event.values["branch"] = "none";
    story.push_back(std::move(event));
  }
  if (story.empty()) return;
  values["local_sgd"] = which.world == 4 && random.chance(60) ? "2" : std::to_string(which.world);
  values["every"] = random.pick({"1", "2", "3"});
  maybe(random, 30, values, "outer", "average");
  maybe(random, 30, values, "outer_background");
  which.story = std::move(story);
}

/// Options for models that do not fit one rank.
void save_memory(Random& random, Theme theme, const std::string& kind, Values& values) {
  const auto none = [&](std::initializer_list<const char*> names) {
    return std::none_of(names.begin(), names.end(),
                        [&](const char* name) { return values.count(name) > 0; });
  };
  maybe(random, 20, values, "deferred");
  if (kind != "zero") return;
  const int shards = theme == Theme::trainability ? 50 : 30;
  if (none({"in_place"})) maybe(random, shards, values, "shard_gradients");
  if (values.count("shard_gradients")) maybe(random, 60, values, "bucket_cap_mb", "0.0002");
  // with_shared_write() writes what is in no group yet on one rank of a host alone.
  if (none({"no_bucket_view", "backend", "late_part"}))
    maybe(random, 30, values, "share_parameters");
  // with_shared_write() broadcasts buffers, which plain training does not.
  if (values.count("buffers") > 0 && values.at("buffers") == "none")
    values.erase("share_parameters");
}

/// Rounds what travels between hosts, in some cases with several of them. `begins`: an error of the
/// construction counts as that of an event, so a combination that the wrapper refuses may stay.
void round_between_hosts(Random& random, Theme theme, const Case& which, int world, bool begins,
                         Item& wrapper) {
  auto& values = wrapper.values;
  const auto before = values;
  const bool on_hosts = values.count("hosts") > 0;
  if (!random.chance(theme == Theme::wire ? 95 : on_hosts ? 60 : 8)) return;
  if (world < 2 || values.count("backend") || values.count("local_sgd")) return;
  if (!on_hosts) values["hosts"] = world == 2 ? "01" : random.pick({"001", "01", "0011", "012"});
  const int what = theme == Theme::wire && random.chance(30) ? 2 : random.below(3);
  if (what < 2) values["wire_gradients"] = random.pick({"bfloat16", "int8"});
  if (what > 0) values["wire_parameters"] = random.pick({"bfloat16", "int8"});
  const bool keeps = random.chance(8) && begins;
  // refuses_wire() does not say what becomes of these.
  const bool open = has(which.layers, {"double_layer"}) ||
                    (which.dtype == "double" && values.count("late_part")) ||
                    (wrapper.kind == "fsdp" && values.count("check_results"));
  const auto fits = [&] { return !open && !refuses_wire(which, wrapper, world); };
  if (fits() || (keeps && !open)) return;
  values.erase("wire_parameters");
  if (!fits() || !values.count("wire_gradients")) values = before;
}

/// Gradients that the user's code scales before the step, a group with another learning rate, and
/// five ranks.
void vary_more(Random& random, Case& which) {
  const auto is = [&](const char* kind) {
    return std::any_of(which.story.begin(), which.story.end(),
                       [&](const Item& event) { return event.kind == kind; });
  };
  const bool scales = random.chance(15) && !rounds(which);
  for (auto& event : which.story) {
    const bool plain = event.kind == "step" && !event.has("closure") && !event.has("uncleared") &&
                       !event.has("absent");
    if (scales && plain && random.chance(40)) event.values["scaled"] = random.pick({"0.5", "0.25"});
  }
  auto& values = which.wrapper.values;
  if (values.count("groups") && !is("move")) maybe(random, 50, values, "second_lr", "0.25");
  const bool divides = values.count("hosts") || values.count("local_sgd") || is("move") ||
                       which.wrapper.text("strategy") == "hybrid";
  if (which.world > 1 && !divides && random.chance(6)) which.world = 5;
}

bool any_move_has(const Case& which, const char* name) {
  return std::any_of(which.story.begin(), which.story.end(),
                     [&](const Item& event) { return event.kind == "move" && event.has(name); });
}

/// Layers with complex parameters and with sparse gradients.
void vary_layers(Random& random, Case& which) {
  const bool mixed = which.wrapper.has("mixed") || any_move_has(which, "mixed");
  const auto& optimizer = which.optimizer.kind;
  // libtorch's other optimizers do not see complex numbers as pairs, and Module::to(double) drops
  // their imaginary parts.
  const bool pairs =
      which.dtype == "float" && (optimizer == "SGD" || optimizer == "Adam" || optimizer == "AdamW");
  // Gradients of a group that is not synchronized stay sparse, which fused optimizers refuse.
  const bool dense = which.wrapper.has("local_group") || any_move_has(which, "local_group");
  for (auto& layer : which.layers) {
    if (mixed) break;
    if (layer.kind == "embedding" && !dense) maybe(random, 40, layer.values, "sparse");
    if (layer.kind == "linear" && pairs && random.chance(25)) {
      layer.kind = "complex";
      layer.values.erase("no_bias");
    }
  }
  // libtorch has no clamp for complex numbers.
  for (auto& event : which.story)
    if (has(which.layers, {"complex"}) && event.text("clip") == "value") event.values.erase("clip");
}

bool has_sparse(const Case& which) {
  return std::any_of(which.layers.begin(), which.layers.end(),
                     [](const Item& layer) { return layer.flag("sparse"); });
}

/// LBFGS evaluates the loss several times in a step, and has one parameter group. What does not
/// suit is left out.
void use_lbfgs(Case& which) {
  which.optimizer = {"LBFGS", {{"lr", "0.05"}}};
  which.wrapper.values.try_emplace("partition", "whole");
  for (const char* name : {"groups", "second_lr", "late_part", "local_sgd", "shard_gradients",
                           "share_parameters", "wire_gradients", "wire_parameters", "in_place"})
    which.wrapper.values.erase(name);
  for (auto& layer : which.layers) layer.values.erase("frozen");
  std::vector<Item> story;
  for (auto& event : which.story) {
    if (event.kind == "move") break;
    if (event.kind == "step") story.push_back({"step", {{"closure", "1"}}});
    if (event.kind == "evaluate" || event.kind == "write" ||
        (event.kind == "lr" && !event.has("rank")))
      story.push_back(event);
  }
  if (story.empty()) story.push_back({"step", {{"closure", "1"}}});
  which.story = std::move(story);
}

/// An optimizer of the program's own that needs whole parameters, or LBFGS.
void vary_optimizer(Random& random, Case& which) {
  const auto& optimizer = which.optimizer.kind;
  if (optimizer != "Adagrad" && optimizer != "RMSprop" && optimizer != "torch.SGD") return;
  if (!random.chance(40)) return;
  if (which.wrapper.kind == "zero" && random.chance(60)) return use_lbfgs(which);
  which.optimizer = {"normalized", {{"lr", "0.02"}}};
  which.wrapper.values.try_emplace("partition", "whole");
  for (auto& event : which.story)
    if (event.kind == "move") event.values.try_emplace("partition", "whole");
}

/// Steps with a GradScaler, and norms that are compared.
void vary_steps(Random& random, Case& which) {
  const auto& values = which.wrapper.values;
  const bool local = values.count("local_group") || values.count("ignored");
  // Steps that are skipped do not show another learning rate of one rank, or a converted module.
  const bool equal = std::none_of(which.story.begin(), which.story.end(), [](const Item& event) {
    return (event.kind == "lr" && event.has("rank")) || event.kind == "to_dtype";
  });
  const bool scales = equal && !rounds(which) && !values.count("local_sgd") &&
                      !values.count("hook") && !any_move_has(which, "hook") &&
                      !has(which.layers, {"half_layer"}) && random.chance(15);
  // libtorch's function makes all gradients NaN where a norm is.
  const bool finite = std::none_of(which.story.begin(), which.story.end(),
                                   [](const Item& event) { return event.has("nan"); });
  const bool measures = finite && !local && !any_move_has(which, "ignored") && !has_sparse(which) &&
                        !any_move_has(which, "local_group") && random.chance(30);
  // libtorch has no largest element of an empty tensor.
  const char* const largest = has(which.layers, {"empty"}) ? "2" : "inf";
  if (which.wrapper.kind == "zero" && !has(which.story, {"move"}))
    maybe(random, 25, which.wrapper.values, "track_norm");
  for (size_t i = 0; i < which.story.size(); ++i) {
    auto& event = which.story[i];
    if (event.kind != "step") continue;
    const auto none = [&](std::initializer_list<const char*> names) {
      return std::none_of(names.begin(), names.end(),
                          [&](const char* name) { return event.has(name); });
    };
    if (!none({"closure", "trap", "absent", "uncleared"})) continue;
    // A sum that the program has edited in place counts as one that it has cleared.
    const bool kept = i + 1 < which.story.size() && which.story[i + 1].has("uncleared");
    if (scales && !kept && none({"kept_graph"})) maybe(random, 50, event.values, "scaler");
    if (measures && none({"clip"}) && random.chance(30))
      event.values["norm_of"] = random.pick({"1", "2", largest});
  }
}

/// DistributedOptimizer gets the parameters of a part later.
void add_late_part(Random& random, Case& which) {
  const auto& values = which.wrapper.values;
  if (which.wrapper.kind != "distributed_optimizer" || has(which.story, {"move"}) ||
      values.count("local_group") || values.count("local_sgd") || rounds(which) ||
      which.optimizer.kind == "Adagrad" || !random.chance(25))
    return;
  which.wrapper.values["late_part"] = std::to_string(random.below(6));
  const auto at = 1 + random.below(static_cast<int>(which.story.size()));
  which.story.insert(which.story.begin() + at, {"add_group"});
  // libtorch's functions would also clip by the gradients that the optimizer does not have yet.
  for (auto& event : which.story)
    for (const char* name : {"clip", "norm_of"}) event.values.erase(name);
}

/// Training that ends and goes on from a checkpoint, with all that the wrapper has.
void add_resumes(Random& random, Theme theme, Case& which) {
  const auto& values = which.wrapper.values;
  if (has(which.story, {"to_dtype", "move"}) || which.optimizer.kind == "LBFGS") return;
  for (const char* name : {"late_part", "ignored", "local_group"})
    if (values.count(name)) return;
  // Ranks may have different buffers between two steps, and a checkpoint has those of one rank.
  if (has(which.layers, {"batch_norm", "cumulative_norm", "instance_norm", "counter"})) return;
  // In a join of DistributedDataParallel only ranks with data step.
  if (which.wrapper.kind == "ddp" && has(which.story, {"join"})) return;
  const bool often = values.count("local_sgd") || rounds(which) || theme == Theme::trainability ||
                     theme == Theme::states;
  if (!random.chance(theme == Theme::wire ? 85 : often ? 60 : 15)) return;
  const auto count = 1 + random.below(2);
  for (int i = 0; i < count; ++i) {
    const auto at = random.below(static_cast<int>(which.story.size()));
    if (which.story[at].has("uncleared")) continue;
    Item resume{"resume"};
    maybe(random, 50, resume.values, "state");
    which.story.insert(which.story.begin() + at, resume);
    // A checkpoint does not have gradients that are zeros.
    for (auto& event : which.story) event.values.erase("zero");
  }
}

/// Two models in one process.
void add_twin(Random& random, Case& which) {
  const bool one = which.wrapper.has("local_sgd") || rounds(which) || has(which.story, {"move"});
  if (!one) maybe(random, 8, which.wrapper.values, "twin");
}

}  // namespace

void vary(Random& random, Theme theme, Case& result) {
  maybe(random, 8, result.wrapper.values, "check_results", "1");
  for (auto& event : result.story)
    if (event.kind == "move") maybe(random, 8, event.values, "check_results", "1");
  divide_into_groups(random, result);
  save_memory(random, theme, result.wrapper.kind, result.wrapper.values);
  for (auto& event : result.story)
    if (event.kind == "move") save_memory(random, theme, event.text("wrapper"), event.values);
  const bool begins = result.story.front().kind != "move";
  round_between_hosts(random, theme, result, result.world, begins, result.wrapper);
  for (auto& event : result.story) {
    if (event.kind != "move") continue;
    Item after{event.text("wrapper"), event.values};
    round_between_hosts(random, theme, result, event.number("world"), true, after);
    event.values = std::move(after.values);
  }
  vary_more(random, result);
  vary_layers(random, result);
  vary_optimizer(random, result);
  vary_steps(random, result);
  add_late_part(random, result);
  add_resumes(random, theme, result);
  add_twin(random, result);
  // A small difference of its input may become a large one.
  for (auto& layer : result.layers)
    if (rounds(result) && layer.kind == "instance_norm") layer.kind = "layer_norm";
  // A comparison of the weights gathers them, which may end what a wrapper has under way.
  for (auto& event : result.story)
    if (!rounds(result)) maybe(random, event.kind == "evaluate" ? 60 : 30, event.values, "quiet");
}

}  // namespace tessera::fuzz
