#include <algorithm>
#include <cmath>

#include "engine/schedule_clock.h"
#include "tessera/config/option_reader.h"
#include "tessera/step/lr_scheduler.h"

namespace tessera {

namespace {

void check_links(const ChainedLrOptions& options) {
  const std::string name = "scheduler chained";
  if (options.schedules.empty())
    throw UsageError(name + ": schedules: empty; expected at least one");
  int64_t free_from = 0;
  for (size_t i = 0; i < options.schedules.size(); ++i) {
    const auto& link = options.schedules[i];
    const std::string place = "schedules[" + std::to_string(i) + "].";
    if (!link.schedule)
      throw UsageError(name + ": " + place + "schedule: empty; expected a schedule");
    check_option(name, place + "begin", link.begin, Range{static_cast<double>(free_from)});
    const bool open = link.end == -1 && i + 1 == options.schedules.size();
    if (!open && link.end <= link.begin) {
      throw UsageError(name + ": " + place + "end: " + std::to_string(link.end) +
                       "; expected more than its begin (" + std::to_string(link.begin) +
                       "); -1, no end, is allowed for the last schedule only");
    }
    free_from = link.end;
  }
}

double ratio(double a, double b) { return b > 0 ? a / b : 0; }

/// `progress` relative to a training that is [begin, end) of the whole one, in units of `by`.
/// Progress beyond `end` counts as `end`.
Progress inside(const Progress& progress, ScheduleBy by, double begin, double end) {
  const auto steps = [](double x) { return static_cast<int64_t>(std::llround(x)); };
  Progress local = progress;
  if (by == ScheduleBy::step) {
    const double epochs_a_step = ratio(progress.epochs, static_cast<double>(progress.steps));
    if (static_cast<double>(local.step) > end) {
      local.step = steps(end);
      local.epoch = end * epochs_a_step;
    }
    local.step -= steps(begin);
    local.steps = steps(end - begin);
    local.epoch -= begin * epochs_a_step;
    local.epochs = (end - begin) * epochs_a_step;
  } else {
    const double steps_an_epoch = ratio(static_cast<double>(progress.steps), progress.epochs);
    if (local.epoch > end) {
      local.epoch = end;
      local.step = steps(end * steps_an_epoch);
    }
    local.epoch -= begin;
    local.epochs = end - begin;
    local.step -= steps(begin * steps_an_epoch);
    local.steps = steps(local.epochs * steps_an_epoch);
  }
  return local;
}

}  // namespace

LrSchedule chained_lr(const ChainedLrOptions& options) {
  check_links(options);
  return [options](const Progress& progress, double base_lr) {
    const double t = engine::moment(progress, options.by);
    const auto& links = options.schedules;
    const auto after = std::find_if(links.begin(), links.end(), [t](const auto& link) {
      return t < static_cast<double>(link.begin);
    });
    if (after == links.begin()) return base_lr;
    const auto& link = *std::prev(after);
    const double end = link.end < 0 ? std::max(engine::total(progress, options.by),
                                               static_cast<double>(link.begin))
                                    : static_cast<double>(link.end);
    return link.schedule(inside(progress, options.by, static_cast<double>(link.begin), end),
                         base_lr);
  };
}

}  // namespace tessera
