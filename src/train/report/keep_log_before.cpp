#include "train/report/keep_log_before.h"

#include <filesystem>
#include <sstream>

#include <nlohmann/json.hpp>

#include "tessera/detail/classic.h"
#include "tessera/detail/write_file.h"

namespace tessera::train {

void keep_log_before(const std::string& path, int64_t step) {
  if (!std::filesystem::exists(path)) {
    return;
  }
  detail::Classic<std::istringstream> file(read_file("log", path));
  std::string kept;
  for (std::string line; std::getline(file, line);) {
    const auto json =
        nlohmann::json::parse(line, nullptr, false);  // the last line may be incomplete
    if (json.is_object() && json.contains("step") && json["step"].is_number_integer() &&
        json["step"].get<int64_t>() < step) {
      kept += line + "\n";
    }
  }
  write_file(path, kept);
}

}  // namespace tessera::train
