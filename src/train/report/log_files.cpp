#include "train/report/log_files.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <sstream>
#include <utility>

#include <nlohmann/json.hpp>

#include "tessera/detail/classic.h"
#include "tessera/detail/write_file.h"

namespace tessera::train {

void keep_log_before(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) return;
  detail::Classic<std::istringstream> file(read_file("log", path));
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const auto json =
        nlohmann::json::parse(line, nullptr, false);  // the last line may be incomplete
    if (json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
        json["step"].get<int64_t>() < step)
      kept += line + "\n";
  }
  write_file(path, kept);
}

std::string EventLog::path_beside(const std::string& log) {
  const std::filesystem::path path(log);
  return (path.parent_path() / (path.stem().string() + ".events.jsonl")).string();
}

void EventLog::open(const std::string& log, bool append) {
  path_ = path_beside(log);
  file_.reset(std::fopen(path_.c_str(), append ? "ae" : "we"));
  if (!file_) problem_ = path_ + ": " + std::strerror(errno);
}

std::string EventLog::write(const std::string& line) {
  if (!problem_.empty()) return std::exchange(problem_, "");
  if (!file_) return "";
  if (write_through(file_.get(), line + "\n")) return "";
  const std::string problem = path_ + ": cannot write: " + std::strerror(errno);
  file_.reset();
  return problem;
}

}  // namespace tessera::train
