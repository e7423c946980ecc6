#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "report/numbers.h"
#include "report/page_style.h"
#include "report/sections.h"
#include "report/svg_chart.h"

namespace tessera::report {
namespace {

using Json = nlohmann::ordered_json;

std::vector<double> finite_values(const RunLog& run, const std::string& name) {
  std::vector<double> values;
  if (const auto found = run.series.find(name); found != run.series.end()) {
    for (const auto& [step, value] : found->second)
      if (std::isfinite(value)) values.push_back(value);
  }
  return values;
}

double median(std::vector<double> values) {
  if (values.empty()) return std::nan("");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// Restarts and checkpoints of all runs, over the step.
std::vector<Mark> marks_of(const std::vector<RunLog>& runs) {
  std::vector<Mark> marks;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto starts = runs[i].events_of("start");
    for (size_t k = 1; k < starts.size(); ++k) {
      marks.push_back(
          {number(*starts[k], "step"), i % kColours,
           fmt::format("started again at step {:.0f}: {:.0f} ranks, {}", number(*starts[k], "step"),
                       number(*starts[k], "ranks"), text(*starts[k], "parallel")),
           false});
    }
    for (const Json* saved : runs[i].events_of("checkpoint")) {
      marks.push_back({number(*saved, "step"), i % kColours,
                       fmt::format("checkpoint after {:.0f} steps", number(*saved, "step")), true});
    }
  }
  return marks;
}

Chart chart_of(const std::vector<RunLog>& runs, const std::string& title,
               const std::vector<std::string>& names) {
  Chart chart;
  chart.title = title;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& name : names) {
      const auto found = runs[i].series.find(name);
      if (found == runs[i].series.end()) continue;
      const bool evaluation = name.rfind("eval_", 0) == 0;
      std::string label = runs.size() > 1 ? runs[i].name : "";
      if (evaluation) label += label.empty() ? "evaluation" : ", evaluation";
      chart.lines.push_back(
          {label.empty() ? "training" : label, found->second, i % kColours, evaluation});
    }
  }
  return chart;
}

/// The value that each start has under `key`, without repetitions: "4 → 2".
std::string of_starts(const RunLog& run, const std::string& key) {
  std::string all, last;
  for (const Json* start : run.events_of("start")) {
    const auto found = start->find(key);
    const std::string value = found == start->end() ? ""
                              : found->is_number()  ? shown(found->get<double>())
                                                    : text(*start, key);
    if (value == last) continue;
    all += (all.empty() ? "" : " → ") + value;
    last = value;
  }
  return all.empty() ? "–" : all;
}

}  // namespace

std::string overview(const std::vector<RunLog>& runs) {
  std::string rows;
  for (const auto& run : runs) {
    const Json* start = run.last("start");
    const Json none = Json::object();
    const Json& about = start ? *start : none;
    const auto losses = finite_values(run, "loss"), evaluations = finite_values(run, "eval_loss");
    const auto tokens = median(finite_values(run, "tokens_per_s"));
    const bool has_tokens = tokens > 0;
    const Json* end = run.last("end");
    const bool ended = end && start && number(*end, "time") >= number(*start, "time");
    rows += fmt::format(
        "<tr><td class=long>{}<td>{}<td>{}<td class=n>{}<td>{}<td class=n>{}<td class=n>{}<td "
        "class=n>{}<td class=n>{} {}<td class=n>{}<td class=n>{}<td>{}</tr>\n",
        escaped(run.name), escaped(text(about, "model")), escaped(text(about, "optimizer")),
        escaped(of_starts(run, "ranks")), escaped(of_starts(run, "parallel")),
        shown(static_cast<double>(run.series.count("loss") ? run.series.at("loss").size() : 0)),
        losses.empty() ? "–" : shown(losses.back()),
        evaluations.empty() ? "–"
                            : shown(*std::min_element(evaluations.begin(), evaluations.end())),
        shown(has_tokens ? tokens : median(finite_values(run, "samples_per_s"))),
        has_tokens ? "tokens/s" : "samples/s", shown(median(finite_values(run, "ms"))),
        shown(static_cast<double>(run.events_of("start").size())),
        ended   ? escaped(text(*end, "outcome"))
        : start ? "no end recorded"
                : "–");
    if (run.unreadable > 0) {
      rows += fmt::format("<tr><td colspan=12 class=note>{} lines could not be read</tr>\n",
                          run.unreadable);
    }
  }
  return "<div class=scroll><table><tr><th>Run<th>Model<th>Optimizer<th "
         "class=n>Ranks<th>Wrapper<th "
         "class=n>Steps<th class=n>Last loss<th class=n>Best evaluation<th class=n>Median rate<th "
         "class=n>Median ms<th class=n>Starts<th>End</tr>\n" +
         rows + "</table></div>\n";
}

std::string charts(const std::vector<RunLog>& runs) {
  struct Known {
    const char* title;
    std::vector<std::string> names;
    bool from_zero, cut_peaks;
  };
  std::vector<Known> known{{"Loss", {"loss", "eval_loss"}, false, false},
                           {"Norm of the gradient", {"grad_norm"}, true, false},
                           {"Learning rate", {"lr"}, true, false},
                           {"Tokens per second", {"tokens_per_s"}, true, false},
                           {"Samples per second", {"samples_per_s"}, true, false},
                           {"Time of a step in ms", {"ms"}, true, true}};
  std::set<std::string> others;
  bool tokens = false;
  for (const auto& run : runs) {
    for (const auto& [name, points] : run.series) others.insert(name);
    const auto rate = run.series.find("tokens_per_s");
    tokens |= rate != run.series.end() && rate->second.back().second > 0;
  }
  known.erase(known.begin() + (tokens ? 4 : 3));
  for (const char* name :
       {"loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "ms", "epoch"})
    others.erase(name);
  const auto marks = marks_of(runs);
  std::string html;
  for (const auto& each : known) {
    Chart chart = chart_of(runs, each.title, each.names);
    chart.from_zero = each.from_zero;
    chart.cut_peaks = each.cut_peaks;
    chart.marks = marks;
    html += svg_of(chart);
  }
  for (const auto& name : others) {
    if (name.rfind("eval_", 0) == 0 && others.count(name.substr(5)) > 0) continue;
    html += svg_of(chart_of(runs, name, {name, "eval_" + name}));
  }
  if (html.empty()) return "";
  return "<h2>Training</h2>\n<div class=grid>" + html + "</div>\n" +
         (marks.empty() ? ""
                        : "<p class=note>Dashed vertical lines are restarts, ticks at the lower "
                          "edge are checkpoints.</p>\n");
}

std::string time_line(const std::vector<RunLog>& runs) {
  Chart chart;
  chart.title = "Steps done over time";
  double longest = 0;
  for (const auto& run : runs) {
    if (run.events.empty()) continue;
    longest = std::max(longest, number(run.events.back(), "time") - number(run.events[0], "time"));
  }
  constexpr double kMinute = 60, kHour = 3600;
  const double unit = longest > 3 * kHour ? kHour : longest > 3 * kMinute ? kMinute : 1;
  chart.x_name = unit == kHour ? "hours" : unit == kMinute ? "minutes" : "seconds";
  for (size_t i = 0; i < runs.size(); ++i) {
    Points points;
    for (const auto& event : runs[i].events) {
      const double at = (number(event, "time") - number(runs[i].events[0], "time")) / unit;
      const std::string kind = text(event, "event");
      if (kind == "start") {
        points.emplace_back(at, std::nan(""));  // a new line for each start
        if (points.size() > 1) chart.marks.push_back({at, i % kColours, "started again", false});
      }
      if (kind == "checkpoint") chart.marks.push_back({at, i % kColours, "checkpoint", true});
      points.emplace_back(at, number(event, "step"));
    }
    if (!points.empty()) chart.lines.push_back({runs[i].name, points, i % kColours, false});
  }
  const std::string svg = svg_of(chart);
  if (svg.empty()) return "";
  std::string rows;
  for (const auto& run : runs) {
    for (const auto& event : run.events) {
      const std::string kind = text(event, "event");
      std::string what;
      if (kind == "start") {
        what = fmt::format(
            "{:.0f} ranks, {}, {}{}", number(event, "ranks"), text(event, "parallel"),
            text(event, "backend"),
            text(event, "resumed_from").empty() ? "" : ", from " + text(event, "resumed_from"));
      } else if (kind == "checkpoint") {
        what = text(event, "path") + " in " + shown_seconds(number(event, "seconds"));
      } else if (kind == "end") {
        what = text(event, "outcome");
      } else {
        continue;
      }
      const double at = number(event, "time") - number(run.events[0], "time");
      rows +=
          fmt::format("<tr><td class=long>{}<td class=n>{}<td class=n>{}<td>{}<td class=long>{}",
                      escaped(run.name), shown_seconds(at), shown(number(event, "step")),
                      escaped(kind), escaped(what)) +
          "</tr>\n";
    }
  }
  return "<h2>Time line</h2>\n<div class=grid>" + svg +
         "</div>\n<details><summary>All starts, checkpoints and ends</summary><div class=scroll>"
         "<table><tr><th>Run<th class=n>After<th class=n>Step<th>Event<th>Details</tr>\n" +
         rows + "</table></div></details>\n";
}

}  // namespace tessera::report
