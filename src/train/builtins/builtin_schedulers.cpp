#include "tessera/step/lr_scheduler.h"
#include "train/builtins/builtin.h"

namespace tessera::train {
namespace {

void read_by(OptionReader& options, ScheduleBy& by) {
  options.read_enum("by", by, {{"step", ScheduleBy::step}, {"epoch", ScheduleBy::epoch}},
                    "what it counts");
}

/// Makes the schedule; what it refuses gets the config's place.
template <class Options>
LrSchedule made(OptionReader& options, LrSchedule (*make)(const Options&), const Options& chosen) {
  options.finish();
  return named(options.at("type"), [&] { return make(chosen); });
}

/// Most kinds: what `read_keys` reads, and by what it counts.
template <class Options>
auto reader(LrSchedule (*make)(const Options&), void (*read_keys)(OptionReader&, Options&)) {
  return [=](OptionReader& options) {
    Options chosen;
    read_keys(options, chosen);
    read_by(options, chosen.by);
    return made(options, make, chosen);
  };
}

LrSchedule read_none(OptionReader& options) {
  for (const char* key : {"warmup_steps", "decay_steps", "min_lr"}) {
    options.refuse(
        key, "has no meaning without a scheduler; set scheduler.type to constant or warmup_cosine");
  }
  options.finish();
  return constant_lr();
}

void read_constant(OptionReader& options, ConstantLrOptions& chosen) {
  options.read("warmup_steps", chosen.warmup_steps, "step s before has lr · (s + 1) / warmup_steps",
               kNotNegative);
  for (const char* key : {"decay_steps", "min_lr"}) {
    options.refuse(key, "belongs to scheduler.type warmup_cosine, and the type is constant");
  }
}

LrSchedule read_warmup_cosine(OptionReader& options) {
  WarmupCosineLrOptions chosen;
  options.read("warmup_steps", chosen.warmup_steps, "step s before has lr · (s + 1) / warmup_steps",
               kNotNegative);
  options.read("decay_steps", chosen.decay_steps, "where the cosine ends; 0: the run's end",
               kNotNegative);
  options.read("min_lr", chosen.min_lr, "where the cosine falls to", kNotNegative);
  read_by(options, chosen.by);
  options.finish();
  if (chosen.decay_steps > 0 && chosen.decay_steps < chosen.warmup_steps) {
    options.fail("decay_steps", std::to_string(chosen.decay_steps) +
                                    " is before the end of the warm-up; expected at least " +
                                    std::to_string(chosen.warmup_steps));
  }
  return made(options, warmup_cosine_lr, chosen);
}

void read_linear(OptionReader& options, LinearLrOptions& chosen) {
  options.read("start_factor", chosen.start_factor, "of lr, at first", Range{0, 1, true, false});
  options.read("end_factor", chosen.end_factor, "of lr, from total_iters on", Range{0, 1});
  options.read("total_iters", chosen.total_iters, "how long it takes", kAtLeastOne);
}

void read_step(OptionReader& options, StepLrOptions& chosen) {
  options.require("step_size", "a whole number >= 1");
  options.read("step_size", chosen.step_size, "lr is multiplied by gamma each time", kAtLeastOne);
  options.read("gamma", chosen.gamma, "factor", kPositive);
}

void read_multi_step(OptionReader& options, MultiStepLrOptions& chosen) {
  options.require("milestones", "a list of whole numbers >= 1");
  options.read("milestones", chosen.milestones, "where lr is multiplied by gamma; ascending",
               kAtLeastOne);
  options.read("gamma", chosen.gamma, "factor", kPositive);
}

void read_exponential(OptionReader& options, ExponentialLrOptions& chosen) {
  options.require("gamma", "a number > 0");
  options.read("gamma", chosen.gamma, "factor of each step or epoch", kPositive);
}

void read_polynomial(OptionReader& options, PolynomialLrOptions& chosen) {
  options.read("total_iters", chosen.total_iters, "where lr reaches 0", kAtLeastOne);
  options.read("power", chosen.power, "of the decay", kPositive);
}

void read_cosine(OptionReader& options, CosineLrOptions& chosen) {
  options.require("t_max", "a whole number >= 1");
  options.read("t_max", chosen.t_max, "half a period", kAtLeastOne);
  options.read("eta_min", chosen.eta_min, "the lowest rate", kNotNegative);
}

LrSchedule read_chained(OptionReader& options) {
  ChainedLrOptions chosen;
  options.require("schedules", "a list of schedulers, each with begin and end");
  auto links =
      options.list("schedules", "schedulers, each with begin and end (none: the run's end)");
  read_by(options, chosen.by);
  options.finish();
  for (auto& inner : links) {
    ChainedLrOptions::Link link;
    std::string type;
    inner.require("type", "a scheduler");
    inner.read_choice("type", type, registry::schedulers().names(), "scheduler");
    inner.read("begin", link.begin, "first step or epoch", kNotNegative);
    inner.read("end", link.end, "the one after the last", Range{-1});
    if (type.empty()) {
      inner.finish();
    }
    link.schedule = registry::schedulers().read(type, inner);
    chosen.schedules.push_back(std::move(link));
  }
  return made(options, chained_lr, chosen);
}

}  // namespace

void add_schedulers(Registry<LrSchedule>& schedulers) {
  schedulers.add("none", read_none, "the optimizer's lr");
  schedulers.add("constant", reader(constant_lr, read_constant),
                 "the optimizer's lr, after a warm-up");
  schedulers.add("warmup_cosine", read_warmup_cosine, "a warm-up, then a cosine");
  schedulers.add("linear", reader(linear_lr, read_linear), "PyTorch's LinearLR");
  schedulers.add("step", reader(step_lr, read_step), "PyTorch's StepLR");
  schedulers.add("multi_step", reader(multi_step_lr, read_multi_step), "PyTorch's MultiStepLR");
  schedulers.add("exponential", reader(exponential_lr, read_exponential),
                 "PyTorch's ExponentialLR");
  schedulers.add("polynomial", reader(polynomial_lr, read_polynomial), "PyTorch's PolynomialLR");
  schedulers.add("cosine", reader(cosine_lr, read_cosine), "PyTorch's CosineAnnealingLR");
  schedulers.add("chained", read_chained, "several, one after another");
}

}  // namespace tessera::train
