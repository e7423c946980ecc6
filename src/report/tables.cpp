#include <algorithm>
#include <cmath>
#include <set>

#include <fmt/format.h>

#include "report/html.h"
#include "report/sections.h"

namespace tessera::report {
namespace {

using Json = nlohmann::ordered_json;

std::vector<double> finite_values(const RunLog& run, const std::string& name) {
  std::vector<double> values;
  if (const auto found = run.series.find(name); found != run.series.end())
    for (const auto& [step, value] : found->second)
      if (std::isfinite(value)) values.push_back(value);
  return values;
}

double median(std::vector<double> values) {
  if (values.empty()) return std::nan("");
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The value that each start has under `key`, without repetitions: "4 → 2".
std::string of_starts(const RunLog& run, const std::string& key) {
  std::string all, last;
  for (const Json* start : run.events_of("start")) {
    const bool is_number = start->contains(key) && start->at(key).is_number();
    const std::string value = is_number ? shown(number(*start, key)) : text(*start, key);
    if (value != last) all += (all.empty() ? "" : " → ") + value;
    last = value;
  }
  return all.empty() ? "–" : all;
}

std::string section(const char* title, const char* note, const std::string& content) {
  return fmt::format("<h2>{}</h2>\n<p class=note>{}</p>\n{}", title, note, content);
}

double total(const Json& use) {
  return number(use, "parameters") + number(use, "gradients") + number(use, "optimizer_state");
}

Row memory_row(const std::string& run, const std::string& name, const Json& use, double largest) {
  return {run,
          name,
          shown_bytes(number(use, "parameters")),
          shown_bytes(number(use, "gradients")),
          shown_bytes(number(use, "optimizer_state")),
          shown_bytes(total(use)),
          fmt::format("{:.0f}", largest > 0 ? 160 * total(use) / largest : 0)};
}

/// The last start of a run after which steps were done, and the record that counts them.
std::pair<const Json*, const Json*> counted_start(const RunLog& run) {
  std::pair<const Json*, const Json*> result{};
  const Json* start = nullptr;
  for (const auto& event : run.events) {
    const std::string kind = text(event, "event");
    if (kind == "start") start = &event;
    const bool counts = kind == "progress" || kind == "end";
    if (counts && start && number(event, "step") > number(*start, "step")) result = {start, &event};
  }
  return result;
}

}  // namespace

std::string overview(const std::vector<RunLog>& runs) {
  std::vector<Row> rows;
  for (const auto& run : runs) {
    const Json* start = run.last("start");
    const Json about = start ? *start : Json::object();
    const auto losses = finite_values(run, "loss"), evaluations = finite_values(run, "eval_loss");
    const auto tokens = median(finite_values(run, "tokens_per_s"));
    const Json* end = run.last("end");
    const bool ended = end && start && number(*end, "time") >= number(*start, "time");
    rows.push_back(
        {run.name + (run.unreadable == 0
                         ? ""
                         : fmt::format(" ({} lines could not be read)", run.unreadable)),
         text(about, "model"), text(about, "optimizer"), of_starts(run, "ranks"),
         of_starts(run, "parallel"),
         shown(static_cast<double>(run.series.count("loss") ? run.series.at("loss").size() : 0)),
         losses.empty() ? "–" : shown(losses.back()),
         evaluations.empty() ? "–"
                             : shown(*std::min_element(evaluations.begin(), evaluations.end())),
         tokens > 0 ? shown(tokens) + " tokens/s"
                    : shown(median(finite_values(run, "samples_per_s"))) + " samples/s",
         shown(median(finite_values(run, "ms"))),
         shown(static_cast<double>(run.events_of("start").size())),
         ended   ? text(*end, "outcome")
         : start ? "no end recorded"
                 : "–"});
  }
  return table({"*Run", "Model", "Optimizer", "#Ranks", "Wrapper", "#Steps", "#Last loss",
                "#Best evaluation", "#Median rate", "#Median ms", "#Starts", "End"},
               rows);
}

std::string memory(const std::vector<RunLog>& runs) {
  double largest = 0;
  for (const auto& run : runs)
    if (const Json* event = run.last("memory"))
      largest = std::max(largest, total(event->value("unsharded", Json())));
  std::vector<Row> rows;
  for (const auto& run : runs) {
    const Json* event = run.last("memory");
    if (!event) continue;
    const Json ranks = event->value("ranks", Json::array());
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      rows.push_back(memory_row(rank == 0 ? run.name : "", fmt::format("rank {}", rank),
                                ranks[rank], largest));
    rows.push_back(memory_row("", "formula", event->value("formula", Json()), largest));
    rows.push_back(memory_row("", "one process", event->value("unsharded", Json()), largest));
  }
  if (rows.empty()) return "";
  return section(
      "Memory",
      "Bytes of each rank beside those that the formula of its wrapper gives, and those of a "
      "single process without sharding. A run that did not reach its end has the bytes of rank 0 "
      "for all ranks.",
      table({"*Run", "", "#Parameters", "#Gradients", "#Optimizer state", "#Total", "|"}, rows));
}

std::string communication(const std::vector<RunLog>& runs) {
  std::vector<Row> rows;
  for (const auto& run : runs) {
    const auto [start, counted] = counted_start(run);
    if (!start) continue;
    const double steps = number(*counted, "step") - number(*start, "step");
    const double ranks = number(*start, "ranks"), bytes = number(*start, "parameter_bytes");
    const size_t first = rows.size();
    double all = 0;
    const auto add = [&](const std::string& kind, const std::string& calls, double received) {
      rows.push_back({rows.size() == first ? run.name : "", kind, calls, shown_bytes(received),
                      fmt::format("{:.3f}", bytes > 0 ? received / bytes : 0)});
    };
    const Json kinds = counted->value("communication", Json::object());
    for (const auto& [kind, stats] : kinds.items()) {
      if (number(stats, "calls") == 0) continue;
      add(kind, shown(number(stats, "calls") / steps), number(stats, "received") / steps);
      all += number(stats, "received") / steps;
    }
    add("all", "", all);
    add("2(W−1)/W of the parameters", "", 2 * (ranks - 1) / ranks * bytes);
  }
  if (rows.empty()) return "";
  return section(
      "Communication",
      "Payload that rank 0 received, by collective and step, since the last start that was "
      "followed by steps. It includes start-up, evaluations and checkpoints. An all-reduce of all "
      "gradients, or a reduce-scatter of them and an all-gather of the parameters, is 2(W−1)/W "
      "times their bytes for W ranks. Full sharding gathers the parameters again for backward: "
      "3(W−1)/W.",
      table({"*Run", "Collective", "#Calls a step", "#Received a step",
             "#Times the parameters' bytes"},
            rows));
}

std::string configs(const std::vector<RunLog>& runs) {
  Row columns{"Key"}, keys;
  std::vector<Json> options;
  for (const auto& run : runs) {
    columns.push_back("*" + run.name);
    const Json* start = run.last("start");
    options.push_back(start ? start->value("config", Json::object()) : Json::object());
    if (!options.back().is_object()) options.back() = Json::object();
    for (const auto& [key, value] : options.back().items())
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) keys.push_back(key);
  }
  if (keys.empty()) return "";
  std::vector<Row> rows, different;
  for (const auto& key : keys) {
    Row row{key};
    for (const auto& of_run : options) row.push_back(text(of_run, key));
    if (std::set(row.begin() + 1, row.end()).size() > 1) different.push_back(row);
    rows.push_back(std::move(row));
  }
  const std::string all = "<details><summary>All options of the last start</summary>" +
                          table(columns, rows) + "</details>\n";
  if (different.empty()) return "<h2>Config</h2>\n" + all;
  return section("Config", "Options in which the runs differ:", table(columns, different) + all);
}

}  // namespace tessera::report
