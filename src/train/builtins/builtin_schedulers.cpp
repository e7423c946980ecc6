#include "tessera/step/lr_scheduler.h"
#include "train/builtins/builtin_components.h"

namespace tessera::train {
namespace {

/// Constructs the schedule; its errors begin with the place in the config.
template <class Options>
LrSchedule made(OptionReader& options, LrSchedule (*make)(const Options&), const Options& chosen) {
  options.finish();
  return named(options.at("type"), [&] { return make(chosen); });
}

template <class Options>
auto reader(LrSchedule (*make)(const Options&)) {
  return [=](OptionReader& options) {
    Options chosen;
    chosen.read(options);
    return made(options, make, chosen);
  };
}

LrSchedule read_none(OptionReader& options) {
  options.finish();
  return constant_lr();
}

LrSchedule read_chained(OptionReader& options) {
  ChainedLrOptions chosen;
  options.require("schedules", "a list of schedulers, each with begin and end");
  auto links =
      options.list("schedules", "schedulers, each with begin and end (end -1: the end of the run)");
  options.read_enum("by", chosen.by, {{"step", ScheduleBy::step}, {"epoch", ScheduleBy::epoch}},
                    "the unit of begin and end");
  options.finish();
  for (auto& inner : links) {
    ChainedLrOptions::Link link;
    std::string type;
    inner.require("type", "a scheduler");
    inner.read_choice("type", type, registry::schedulers().names(), "scheduler");
    inner.read("begin", link.begin, "first step or epoch", kNotNegative);
    inner.read("end", link.end, "the step or epoch after the last; -1: the end of the run",
               Range{-1});
    if (type.empty()) inner.finish();
    link.schedule = registry::schedulers().read(type, inner);
    chosen.schedules.push_back(std::move(link));
  }
  return made(options, chained_lr, chosen);
}

}  // namespace

void add_schedulers(Registry<LrSchedule>& schedulers) {
  schedulers.add("none", read_none, "always the optimizer's lr");
  schedulers.add("constant", reader(constant_lr), "the optimizer's lr, after a warm-up");
  schedulers.add("warmup_cosine", reader(warmup_cosine_lr), "a warm-up, then a cosine");
  schedulers.add("linear", reader(linear_lr), "PyTorch's LinearLR");
  schedulers.add("step", reader(step_lr), "PyTorch's StepLR");
  schedulers.add("multi_step", reader(multi_step_lr), "PyTorch's MultiStepLR");
  schedulers.add("exponential", reader(exponential_lr), "PyTorch's ExponentialLR");
  schedulers.add("polynomial", reader(polynomial_lr), "PyTorch's PolynomialLR");
  schedulers.add("cosine", reader(cosine_lr), "PyTorch's CosineAnnealingLR");
  schedulers.add("chained", read_chained, "several schedules, one after another");
}

}  // namespace tessera::train
