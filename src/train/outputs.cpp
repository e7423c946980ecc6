#include "train/outputs.h"

#include <filesystem>
#include <system_error>

#include "tessera/error.h"
#include "tessera/files.h"

namespace tessera::train {
namespace {

namespace fs = std::filesystem;

void prepare_file(const Config& config, const std::string& key, const std::string& file) {
  if (file.empty()) {
    return;
  }
  const fs::path folder = fs::path(file).parent_path();
  std::error_code failure;
  if (!folder.empty()) {
    fs::create_directories(folder, failure);
  }
  if (failure) {
    throw UsageError(config.at(key) + file + ": cannot make the folder " + folder.string() + ": " + failure.message());
  }
  try {
    check_writable(file);
  } catch (const Error& error) {
    throw UsageError(config.at(key) + error.what());
  }
}

}  // namespace

void prepare_outputs(const Config& config) {
  prepare_file(config, "train.log", config.train.log);
  prepare_file(config, "train.save", config.train.save);
}

}  // namespace tessera::train
