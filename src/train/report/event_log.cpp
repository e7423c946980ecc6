#include "train/report/event_log.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

namespace tessera::train {

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
  if (std::fputs((line + "\n").c_str(), file_.get()) >= 0 && std::fflush(file_.get()) == 0) {
    return "";
  }
  const std::string problem = path_ + ": cannot write: " + std::strerror(errno);
  file_.reset();
  return problem;
}

}  // namespace tessera::train
