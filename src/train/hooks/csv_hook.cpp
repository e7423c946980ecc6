#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "train/hooks/hooks.h"

namespace tessera::train {
namespace {

using Row = std::vector<std::string>;

Row fields_of(const std::string& line) {
  Row fields;
  std::istringstream text(line);
  for (std::string field; std::getline(text, field, ',');) fields.push_back(field);
  return fields;
}

std::string line_of(const Row& fields) {
  std::string line;
  for (size_t i = 0; i < fields.size(); ++i) line += (i > 0 ? "," : "") + fields[i];
  return line + "\n";
}

class CsvHook : public RunHook {
 public:
  explicit CsvHook(CsvHookOptions options) : path_(std::move(options.path)) {}
  ~CsvHook() override {
    if (writes_) paths().erase(path_);
  }
  CsvHook(const CsvHook&) = delete;

  void on_record(const std::string& json) override {
    const auto record = nlohmann::ordered_json::parse(json);
    if (record.contains("event")) {
      if (record.at("event") == "start") begin(record.at("step").get<int64_t>());
      return;
    }
    const auto step = record.at("step").get<int64_t>();
    bool again = step == last_step_;
    for (const auto& [name, value] : record.items()) {
      if (std::find(columns_.begin(), columns_.end(), name) == columns_.end()) {
        columns_.push_back(name);
        again = true;
      }
    }
    if (again || !file_) rewrite(step);
    Row row(columns_.size());
    for (size_t i = 0; i < columns_.size(); ++i) {
      const auto value = record.find(columns_[i]);
      if (value != record.end() && value->is_number()) row[i] = value->dump();
    }
    append(line_of(row));
    last_step_ = step;
  }

 private:
  /// Takes the columns of the file, where it exists, and keeps its rows of steps before `step`.
  void begin(int64_t step) {
    if (!writes_ && !paths().insert(path_).second)
      throw UsageError(path_ + ": two CSV hooks write it; expected a file of its own for each");
    writes_ = true;
    columns_.clear();
    file_.reset();
    const std::string before = contents(), header = before.substr(0, before.find('\n'));
    if (!header.empty()) columns_ = fields_of(header);
    // Another file, data for example, must not be lost.
    if (!header.empty() && (columns_.empty() || columns_.front() != "step"))
      throw UsageError(path_ + ": its first column is not step; expected a file of this hook");
    if (step == 0) columns_.clear();
    last_step_ = step - 1;
    if (!columns_.empty()) rewrite(step);
    else if (std::filesystem::exists(path_)) write_file(path_, "");
    else check_writable(path_);
  }

  std::string contents() const {
    return std::filesystem::exists(path_) ? read_file("CSV", path_) : "";
  }

  /// Writes the header and the rows of steps before `step`, each with a field for each column.
  void rewrite(int64_t step) {
    std::string text = line_of(columns_);
    std::istringstream file(contents());
    std::string line;
    std::getline(file, line);  // the header
    while (std::getline(file, line)) {
      Row row = fields_of(line);
      if (row.empty() || row[0].empty() || std::atoll(row[0].c_str()) >= step) continue;
      row.resize(columns_.size());
      text += line_of(row);
    }
    write_file(path_, text);
    file_.reset(std::fopen(path_.c_str(), "ae"));
    if (!file_) throw Error(path_ + ": " + std::strerror(errno));
  }

  void append(const std::string& text) {
    if (!write_through(file_.get(), text))
      throw Error(path_ + ": cannot write: " + std::strerror(errno));
  }

  /// The files that hooks of this process write.
  static std::set<std::string>& paths() {
    static auto& all = *new std::set<std::string>();  // never destroyed: hooks may outlive it
    return all;
  }

  std::string path_;
  bool writes_ = false;  // on rank 0
  Row columns_;
  int64_t last_step_ = -1;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_{nullptr, &std::fclose};
};

}  // namespace

void CsvHookOptions::read(OptionReader& options) {
  options.require("path", "the file to write");
  options.read_path("path", path, "file to write, such as log.csv; its folder must exist");
}

std::shared_ptr<RunHook> csv_hook(const CsvHookOptions& options) {
  return std::make_shared<CsvHook>(options);
}

}  // namespace tessera::train
