#include "report/run_log.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tessera/error.h"

namespace tessera::report {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* kEvents = ".events.jsonl";

template <class Use>
int64_t for_each_line(const std::string& path, const Use& use) {
  std::error_code ignored;
  if (fs::exists(path, ignored) && !fs::is_regular_file(path, ignored))
    throw UsageError(path + ": is not a regular file; expected a log of a run");
  std::ifstream file(path, std::ios::binary);
  if (!file) throw UsageError(path + ": " + std::strerror(errno) + "; expected a log of a run");
  int64_t unreadable = 0;
  for (std::string line; std::getline(file, line);) {
    const Json record = Json::parse(line, nullptr, false);
    if (!record.is_object()) {
      ++unreadable;
      continue;
    }
    use(record);
  }
  return unreadable;
}

void add_step(RunLog& run, const Json& record) {
  const auto step = record.find("step");
  if (step == record.end() || !step->is_number()) return;
  for (const auto& [name, value] : record.items()) {
    if (name == "step" || !(value.is_number() || value.is_null())) continue;
    run.series[name].emplace_back(step->get<double>(),
                                  value.is_null() ? std::nan("") : value.get<double>());
  }
}

RunLog read_log(const std::string& path) {
  RunLog run;
  run.name = path;
  run.unreadable = for_each_line(path, [&](const Json& record) { add_step(run, record); });
  const fs::path log(path);
  const std::string events = (log.parent_path() / (log.stem().string() + kEvents)).string();
  if (fs::exists(events)) {
    run.unreadable += for_each_line(events, [&](const Json& record) {
      if (record.contains("event") && record.contains("time")) run.events.push_back(record);
    });
  }
  if (run.series.empty() && run.events.empty())
    throw UsageError(path + ": it has no record of a run; expected the file that train.log names");
  return run;
}

}  // namespace

std::vector<const Json*> RunLog::events_of(const std::string& kind) const {
  std::vector<const Json*> found;
  for (const auto& event : events)
    if (text(event, "event") == kind) found.push_back(&event);
  return found;
}

const Json* RunLog::last(const std::string& kind) const {
  const auto found = events_of(kind);
  return found.empty() ? nullptr : found.back();
}

std::vector<RunLog> read_runs(const std::string& path) {
  if (!fs::is_directory(path)) return {read_log(path)};
  std::vector<std::string> logs;
  for (const auto& entry : fs::directory_iterator(path)) {
    const std::string file = entry.path().string();
    if (entry.is_regular_file() && file.ends_with(".jsonl") && !file.ends_with(kEvents))
      logs.push_back(file);
  }
  if (logs.empty()) {
    throw UsageError(path + ": the folder has no log (*.jsonl); expected the file that train.log " +
                     "names, or its folder");
  }
  std::sort(logs.begin(), logs.end());
  std::vector<RunLog> runs;
  for (const auto& log : logs) runs.push_back(read_log(log));
  return runs;
}

double number(const Json& json, const std::string& key, double otherwise) {
  const bool known = json.is_object() && json.contains(key) && json[key].is_number();
  return known ? json[key].get<double>() : otherwise;
}

std::string text(const Json& json, const std::string& key) {
  const bool known = json.is_object() && json.contains(key) && json[key].is_string();
  return known ? json[key].get<std::string>() : "";
}

}  // namespace tessera::report
