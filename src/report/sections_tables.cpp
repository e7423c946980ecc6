#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "report/numbers.h"
#include "report/sections.h"

namespace tessera::report {
namespace {

using Json = nlohmann::ordered_json;

double total(const Json& use) {
  return number(use, "parameters") + number(use, "gradients") + number(use, "optimizer_state");
}

std::string memory_row(const std::string& run, const std::string& name, const Json& use,
                       double largest) {
  std::string cells;
  for (const char* kind : {"parameters", "gradients", "optimizer_state"})
    cells += "<td class=n>" + shown_bytes(number(use, kind));
  return fmt::format(
      "<tr><td class=long>{}<td>{}{}<td class=n>{}<td><span class=bar style='width:{:.0f}px'>"
      "</span></tr>\n",
      escaped(run), name, cells, shown_bytes(total(use)),
      largest > 0 ? 160 * total(use) / largest : 0);
}

}  // namespace

std::string memory(const std::vector<RunLog>& runs) {
  double largest = 0;
  for (const auto& run : runs)
    if (const Json* event = run.last("memory"))
      largest = std::max(largest, total(event->value("unsharded", Json())));
  std::string rows;
  for (const auto& run : runs) {
    const Json* event = run.last("memory");
    if (!event) continue;
    const Json ranks = event->value("ranks", Json::array());
    std::string name = run.name;
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      rows += memory_row(name, "rank " + std::to_string(rank), ranks[rank], largest);
      name = "";
    }
    rows += memory_row("", "formula", event->value("formula", Json()), largest) +
            memory_row("", "one process", event->value("unsharded", Json()), largest);
  }
  if (rows.empty()) return "";
  return "<h2>Memory</h2>\n<p class=note>Bytes of each rank beside those that the formula of its "
         "wrapper gives, and those of a single process without sharding. A run that did not reach "
         "its end has the bytes of rank 0 for all ranks.</p>\n<div class=scroll><table><tr><th>Run"
         "<th><th class=n>Parameters<th class=n>Gradients<th class=n>Optimizer state<th class=n>"
         "Total<th></tr>\n" +
         rows + "</table></div>\n";
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

std::string communication(const std::vector<RunLog>& runs) {
  std::string rows;
  for (const auto& run : runs) {
    const auto [start, counted] = counted_start(run);
    if (!start) continue;
    const double steps = number(*counted, "step") - number(*start, "step");
    const double ranks = number(*start, "ranks"), bytes = number(*start, "parameter_bytes");
    const Json kinds = counted->value("communication", Json::object());
    std::string name = run.name;
    double all = 0;
    const auto row = [&](const std::string& kind, const std::string& calls, double received) {
      rows += fmt::format(
          "<tr><td class=long>{}<td>{}<td class=n>{}<td class=n>{}<td class=n>{:.3f}</tr>\n",
          escaped(name), kind, calls, shown_bytes(received), bytes > 0 ? received / bytes : 0);
      name = "";
    };
    for (const auto& [kind, stats] : kinds.items()) {
      if (number(stats, "calls") == 0) continue;
      row(escaped(kind), shown(number(stats, "calls") / steps), number(stats, "received") / steps);
      all += number(stats, "received") / steps;
    }
    row("all", "", all);
    rows += fmt::format(
        "<tr><td><td>2(W−1)/W of the parameters<td><td class=n>{}<td class=n>{:.3f}</tr>\n",
        shown_bytes(2 * (ranks - 1) / ranks * bytes), 2 * (ranks - 1) / ranks);
  }
  if (rows.empty()) return "";
  return "<h2>Communication</h2>\n<p class=note>Payload that rank 0 received, by collective and "
         "step, since the last start that was followed by steps. It includes start-up, evaluations "
         "and checkpoints. An "
         "all-reduce of all gradients, or a reduce-scatter of them and an all-gather of the "
         "parameters, is 2(W−1)/W times their bytes for W ranks. Full sharding gathers the "
         "parameters again for backward: 3(W−1)/W.</p>\n<div class=scroll><table><tr><th>Run<th>"
         "Collective<th class=n>Calls a step<th class=n>Received a step<th class=n>Times the "
         "parameters' bytes</tr>\n" +
         rows + "</table></div>\n";
}

std::string configs(const std::vector<RunLog>& runs) {
  std::vector<std::string> keys;
  std::set<std::string> known;
  std::vector<Json> options;
  for (const auto& run : runs) {
    const Json* start = run.last("start");
    options.push_back(start ? start->value("config", Json::object()) : Json::object());
    if (!options.back().is_object()) options.back() = Json::object();
    for (const auto& [key, value] : options.back().items())
      if (known.insert(key).second) keys.push_back(key);
  }
  if (keys.empty()) return "";
  std::string head = "<tr><th>Key", different, rows;
  for (const auto& run : runs) head += "<th class=long>" + escaped(run.name);
  head += "</tr>\n";
  for (const auto& key : keys) {
    std::string row = "<tr><td>" + escaped(key);
    std::set<std::string> values;
    for (const auto& of_run : options) {
      const std::string value = text(of_run, key);
      values.insert(value);
      row += "<td class=long>" + escaped(value);
    }
    row += "</tr>\n";
    rows += row;
    if (values.size() > 1) different += row;
  }
  std::string html = "<h2>Config</h2>\n";
  if (!different.empty()) {
    html += "<p class=note>Options in which the runs differ:</p>\n<div class=scroll><table>" +
            head + different + "</table></div>\n";
  }
  return html +
         "<details><summary>All options of the last start</summary><div class=scroll><table>" +
         head + rows + "</table></div></details>\n";
}

}  // namespace tessera::report
