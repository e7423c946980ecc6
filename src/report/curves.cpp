#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "report/chart.h"
#include "report/html.h"
#include "report/page_style.h"
#include "report/sections.h"

namespace tessera::report {
namespace {

/// Restarts and checkpoints of all runs, over the step.
std::vector<Mark> marks_of(const std::vector<RunLog>& runs) {
  std::vector<Mark> marks;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto starts = runs[i].events_of("start");
    for (size_t k = 1; k < starts.size(); ++k) {
      const double step = number(*starts[k], "step");
      marks.push_back({step, i % kColours,
                       fmt::format("started again at step {:.0f}: {:.0f} ranks, {}", step,
                                   number(*starts[k], "ranks"), text(*starts[k], "parallel"))});
    }
    for (const auto* saved : runs[i].events_of("checkpoint")) {
      const double step = number(*saved, "step");
      marks.push_back(
          {step, i % kColours, fmt::format("checkpoint after {:.0f} steps", step), true});
    }
  }
  return marks;
}

std::vector<Line> lines_of(const std::vector<RunLog>& runs, const std::vector<std::string>& names) {
  std::vector<Line> lines;
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const auto& name : names) {
      const auto found = runs[i].series.find(name);
      if (found == runs[i].series.end()) continue;
      const bool evaluation = name.starts_with("eval_");
      std::string label = runs.size() > 1 ? runs[i].name : evaluation ? "" : "training";
      if (evaluation) label += label.empty() ? "evaluation" : ", evaluation";
      lines.push_back({label, found->second, i % kColours, evaluation});
    }
  }
  return lines;
}

double seconds(const RunLog& run, const nlohmann::ordered_json& event) {
  return number(event, "time") - number(run.events[0], "time");
}

std::string details_of(const nlohmann::ordered_json& event, const std::string& kind) {
  const std::string from = text(event, "resumed_from");
  if (kind == "start")
    return fmt::format("{:.0f} ranks, {}, {}{}", number(event, "ranks"), text(event, "parallel"),
                       text(event, "backend"), from.empty() ? "" : ", from " + from);
  if (kind == "checkpoint")
    return text(event, "path") + " in " + shown_seconds(number(event, "seconds"));
  return text(event, "outcome");
}

}  // namespace

std::string charts(const std::vector<RunLog>& runs) {
  std::set<std::string> others;
  bool tokens = false;
  for (const auto& run : runs) {
    for (const auto& [name, points] : run.series) others.insert(name);
    const auto rate = run.series.find("tokens_per_s");
    tokens |= rate != run.series.end() && rate->second.back().second > 0;
  }
  const auto marks = marks_of(runs);
  std::string html;
  const auto add = [&](const char* title, const std::vector<std::string>& names, bool from_zero,
                       bool cut_peaks) {
    html += svg_of({title, "step", lines_of(runs, names), marks, from_zero, cut_peaks});
  };
  add("Loss", {"loss", "eval_loss"}, false, false);
  add("Norm of the gradient", {"grad_norm"}, true, false);
  add("Learning rate", {"lr"}, true, false);
  if (tokens) add("Tokens per second", {"tokens_per_s"}, true, false);
  else add("Samples per second", {"samples_per_s"}, true, false);
  add("Time of a step in ms", {"ms"}, true, true);
  for (const char* name :
       {"loss", "eval_loss", "grad_norm", "lr", "tokens_per_s", "samples_per_s", "ms", "epoch"})
    others.erase(name);
  for (const auto& name : others) {
    if (name.starts_with("eval_") && others.count(name.substr(5)) > 0) continue;
    html += svg_of({name, "step", lines_of(runs, {name, "eval_" + name}), {}});
  }
  if (html.empty()) return "";
  return "<h2>Training</h2>\n<div class=grid>" + html + "</div>\n" +
         (marks.empty() ? ""
                        : "<p class=note>Dashed vertical lines are restarts, ticks at the lower "
                          "edge are checkpoints.</p>\n");
}

std::string time_line(const std::vector<RunLog>& runs) {
  double longest = 0;
  for (const auto& run : runs)
    if (!run.events.empty()) longest = std::max(longest, seconds(run, run.events.back()));
  constexpr double kMinute = 60, kHour = 3600;
  const double unit = longest > 3 * kHour ? kHour : longest > 3 * kMinute ? kMinute : 1;
  Chart chart;
  chart.title = "Steps done over time";
  chart.x_name = unit == kHour ? "hours" : unit == kMinute ? "minutes" : "seconds";
  std::vector<Row> rows;
  for (size_t i = 0; i < runs.size(); ++i) {
    Line line{runs[i].name, {}, i % kColours};
    for (const auto& event : runs[i].events) {
      const double at = seconds(runs[i], event), step = number(event, "step");
      const std::string kind = text(event, "event");
      if (kind == "start") {
        line.points.emplace_back(at / unit, std::nan(""));  // a new line for each start
        if (line.points.size() > 1)
          chart.marks.push_back({at / unit, line.colour, "started again"});
      }
      if (kind == "checkpoint") chart.marks.push_back({at / unit, line.colour, kind, true});
      line.points.emplace_back(at / unit, step);
      if (kind == "start" || kind == "checkpoint" || kind == "end")
        rows.push_back({line.name, shown_seconds(at), shown(step), kind, details_of(event, kind)});
    }
    if (!line.points.empty()) chart.lines.push_back(line);
  }
  const std::string svg = svg_of(chart);
  if (svg.empty()) return "";
  return "<h2>Time line</h2>\n<div class=grid>" + svg +
         "</div>\n<details><summary>All starts, checkpoints and ends</summary>" +
         table({"*Run", "#After", "#Step", "Event", "*Details"}, rows) + "</details>\n";
}

}  // namespace tessera::report
