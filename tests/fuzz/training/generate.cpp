#include <algorithm>
#include <set>

#include "fuzz/training/draw_story.h"
#include "fuzz/training/model/blocks.h"
#include "fuzz/training/vary.h"

namespace tessera::fuzz {
namespace {

/// All layers compute in the dtype of their input, with operators that libtorch 1.13 has for it.
/// Those with a LayerNorm are left out: a small difference of its input may become a large one.
bool computes_in_bfloat16(const std::vector<Item>& layers) {
  static const std::set<std::string> kinds = {
      "linear",  "embedding",   "attention",  "module_list", "module_dict", "scalar",
      "strided", "views",       "functional", "custom",      "tied",        "shared",
      "unused",  "conditional", "experts",    "checkpoint"};
  return std::all_of(layers.begin(), layers.end(),
                     [](const Item& layer) { return kinds.count(layer.kind) > 0; });
}

Theme random_theme(Random& random) {
  return random.pick({Theme::any, Theme::any, Theme::any, Theme::any, Theme::trainability,
                      Theme::states, Theme::accumulation, Theme::joins, Theme::wire,
                      Theme::faults});
}

/// Some layer is of a kind that the theme needs.
void suit_layers(Random& random, Theme theme, std::vector<Item>& layers) {
  auto& layer = layers[random.below(static_cast<int>(layers.size()))];
  if (!random.chance(80)) return;
  if (theme == Theme::trainability) layer.values["frozen"] = "1";
  if (theme == Theme::accumulation) layer = {random.pick({"conditional", "experts"})};
  if (theme == Theme::joins)
    layer = {random.pick({"batch_norm", "cumulative_norm", "instance_norm", "counter"})};
}

std::vector<Item> random_layers(Random& random, Theme theme, bool exact) {
  std::vector<Item> layers;
  const int count = 1 + random.below(5);
  const auto& kinds = block_kinds();
  for (int i = 0; i < count; ++i) {
    Item layer{kinds[random.below(static_cast<int>(kinds.size()))]};
    // Values that differ in the last bit are rounded to 16-bit values that differ much more.
    if (is_short(layer) && !exact) layer.kind = "linear";
    maybe(random, 50, layer.values, "out", std::to_string(3 + random.below(5)));
    maybe(random, 10, layer.values, "frozen");
    if (layer.kind == "linear") maybe(random, 20, layer.values, "no_bias");
    if (layer.kind == "conv2d") maybe(random, 50, layer.values, "channels_last");
    if (layer.kind == "embedding") maybe(random, 30, layer.values, "padding");
    if (layer.kind == "rnn" || layer.kind == "gru")
      maybe(random, 30, layer.values, "bidirectional");
    if (layer.kind == "lstm") maybe(random, 30, layer.values, "layers", "2");
    layers.push_back(layer);
  }
  suit_layers(random, theme, layers);
  // A small difference of a norm's input may become a large one.
  const bool rounded = std::any_of(layers.begin(), layers.end(), is_short);
  for (auto& layer : layers)
    if (rounded && layer.kind.find("_norm") != std::string::npos) layer = {"linear"};
  return layers;
}

Item random_optimizer(Random& random, bool exact) {
  if (!exact) {
    Item optimizer{random.pick(
        {"torch.SGD", "torch.AdamW", "torch.Adam", "Adagrad", "RMSprop", "SGD", "AdamW"})};
    optimizer.values["lr"] = "0.02";
    // A norm that is summed in another order changes the rounding noise that is the gradient in
    // front of a normalisation. Division by its size would enlarge that without limit (seed
    // 604246).
    if (optimizer.kind.find("SGD") == std::string::npos) optimizer.values["eps"] = "0.001";
    return optimizer;
  }
  Item optimizer{random.pick({"SGD", "Adam", "AdamW"})};
  optimizer.values["lr"] = "0.02";
  if (optimizer.kind == "SGD") {
    if (random.chance(60)) {
      optimizer.values["momentum"] = "0.9";
      maybe(random, 30, optimizer.values, "nesterov");
    }
  } else {
    maybe(random, 30, optimizer.values, "amsgrad");
  }
  maybe(random, 40, optimizer.values, "weight_decay", "0.1");
  return optimizer;
}

std::string part(int number) { return std::to_string(number); }

}  // namespace

Item random_wrapper(Random& random, const Limits& limits, int world) {
  Item wrapper{
      random.pick({"ddp", "ddp", "zero", "zero", "zero", "ddp_zero", "distributed_optimizer",
                   "distributed_optimizer", "fsdp", "fsdp", "fsdp"})};
  if (limits.theme == Theme::wire && random.chance(40)) wrapper.kind = "zero";
  if (limits.theme == Theme::accumulation && random.chance(30)) wrapper.kind = "fsdp";
  auto& values = wrapper.values;
  maybe(random, 10, values, "backend", random.pick({"tcp", "tcp", "mpi"}));
  if (values.empty() && world > 2 && random.chance(15))
    values["hosts"] = random.pick({"001", "01", "0011", "012"});
  if (values.count("hosts") > 0) maybe(random, 20, values, "backend", "mpi");
  if (random.chance(30)) values["buffers"] = random.pick({"mean", "none"});
  if (random.chance(50)) values["overlap"] = random.pick({"none", "background", "background"});
  const auto& kind = wrapper.kind;
  // Each rank would clip by the norm of its own gradients.
  const bool may_ignore = limits.ignorable >= 0 && !limits.norms;
  const bool ddp = kind == "ddp" || kind == "ddp_zero";
  if (ddp) {
    if (limits.partly_used ? random.chance(90) : random.chance(30)) values["find_unused"] = "1";
    maybe(random, 50, values, "bucket_cap_mb", "0.0002");
    maybe(random, 50, values, "first_bucket_mb", "0.0001");
    if (kind == "ddp") {
      if (!limits.short_numbers && random.chance(15))
        values["hook"] = random.pick({"fp16", "bf16"});
      if (may_ignore) maybe(random, 15, values, "ignored", part(limits.ignorable));
    }
    if (!limits.partly_used) maybe(random, 15, values, "static_graph");
    if (kind == "ddp_zero") maybe(random, 30, values, "no_reduce");
  }
  if (kind == "zero" || kind == "ddp_zero") {
    if (limits.exact) {
      if (random.chance(50)) values["partition"] = random.pick({"whole", "first_fit"});
    } else if (random.chance(60)) {
      values["partition"] = random.pick({"whole", "first_fit"});
    }
    maybe(random, 30, values, "no_bucket_view");
    maybe(random, 25, values, "groups", "2");
  }
  if (kind == "zero") {
    maybe(random, 30, values, "in_place");
    if (values.count("in_place")) values["overlap"] = "none";  // reductions in step() alone use up
    maybe(random, 15, values, "late_part", std::to_string(random.below(6)));
  }
  if (kind == "distributed_optimizer") {
    values["reduce"] = random.pick({"mean", "mean", "sum"});
    if (random.chance(50)) {
      values["param_pack"] = "1";
      maybe(random, 70, values, "param_pack_thd", random.pick({"1", "100", "400"}));
    }
    maybe(random, 30, values, "bcast_period", random.pick({"1", "2"}));
    maybe(random, 25, values, "groups", "2");
    if (values.count("groups") && !limits.norms && values["reduce"] == "mean")
      maybe(random, 25, values, "local_group");
    // A rank of which no parameter of a group gets a gradient would not meet the others.
    if (!values.count("local_group")) maybe(random, 50, values, "own_backward");
  }
  if (kind == "fsdp") {
    // One unit has parameters that are used in different passes.
    const int several = limits.theme == Theme::accumulation ? 40 : 80;
    if (random.chance(several)) values["policy"] = random.pick({"blocks", "leaves", "size"});
    if (random.chance(40)) {
      values["strategy"] = random.pick({"grad_op", "none", "hybrid"});
      const bool divisible = world % 2 == 0 && (world == 2 || !limits.exact);
      if (values["strategy"] == "hybrid" && !divisible) values["strategy"] = "grad_op";
    }
    if (random.chance(30)) values["partition"] = random.pick({"whole", "first_fit"});
    maybe(random, 30, values, "resident_bytes", "1");
    if (random.chance(20)) values.try_emplace("strategy", "grad_op");
    if (random.chance(40)) values["prefetch"] = random.pick({"post", "none"});
    maybe(random, 25, values, "groups", "2");
    if (limits.mixed && random.chance(50))
      values["mixed"] = random.pick({"sums_in_bfloat16", "sums_in_float"});
    // The optimizer then lacks these parameters, and so does its state.
    // An ignored parameter keeps its dtype.
    if (may_ignore && !limits.moves && !values.count("mixed"))
      maybe(random, 60, values, "ignored", part(limits.ignorable));
  }
  return wrapper;
}

Case generate(uint64_t seed) {
  Random random(seed * 2 + 1);
  Case result;
  result.seed = seed;
  Limits limits;
  limits.theme = random_theme(random);
  limits.exact = random.chance(70);
  result.world = random.pick({1, 2, 2, 2, 2, 3, 3, 3, 4});
  result.dtype = limits.exact && random.chance(70) ? "float" : "double";
  result.layers = random_layers(random, limits.theme, limits.exact);
  limits.partly_used = has(result.layers, {"unused", "tied", "conditional", "experts"});
  result.optimizer = random_optimizer(random, limits.exact);
  // The last bit of a 16-bit weight may differ, which Adam would turn into much more.
  limits.short_numbers = has(result.layers, {"bfloat16_layer", "half_layer"});
  limits.value_clips = !has(result.layers, {"half_layer"});
  limits.moves = random.chance(limits.theme == Theme::wire ? 20 : 80);
  for (size_t i = 0; i < result.layers.size(); ++i)
    if (result.layers[i].kind == "linear") limits.ignorable = static_cast<int>(i);
  limits.mixed = limits.exact && result.dtype == "float" && computes_in_bfloat16(result.layers) &&
                 random.chance(60);
  if (limits.short_numbers || limits.mixed) result.optimizer = {"SGD", {{"lr", "0.02"}}};
  if (limits.short_numbers && seed % 2 == 0) result.optimizer.values["master_weights"] = "1";
  // Other optimizers would turn a difference in the last bit of a float into much more.
  limits.norms = !limits.exact || (result.dtype == "float" && result.optimizer.kind == "SGD" &&
                                   !limits.short_numbers && random.chance(30));
  const bool adagrad = result.optimizer.kind == "Adagrad";  // libtorch's has no new groups
  result.wrapper = random_wrapper(random, limits, result.world);
  if (adagrad) result.wrapper.values.erase("late_part");
  add_story(random, limits, result);
  const auto has_event = [&](const char* kind) {
    return std::any_of(result.story.begin(), result.story.end(),
                       [&](const Item& event) { return event.kind == kind; });
  };
  const bool freezes = has_event("freeze");
  for (auto& event : result.story) {
    // Before libtorch 2, a plain optimizer still updates a frozen parameter whose `.grad` was
    // zeroed.
    if (freezes) event.values.erase("zero");
  }
  vary(random, limits.theme, result);
  // Small steps: what rounding takes from a parameter itself is large beside them.
  if (rounds(result) && result.optimizer.kind == "SGD") result.optimizer.values["lr"] = "0.002";
  return result;
}

}  // namespace tessera::fuzz
