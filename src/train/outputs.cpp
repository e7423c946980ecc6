#include "train/outputs.h"

#include <filesystem>
#include <system_error>

#include "checkpoint/atomic_file.h"
#include "tessera/error.h"

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
    AtomicFile probe("output", file);
  } catch (const Error& error) {
    throw UsageError(config.at(key) + error.what());
  }
}

}  // namespace

void prepare_outputs(const Config& config) {
  prepare_file(config, "train.log", config.train.log);
  prepare_file(config, "train.save", config.train.save);
}

void write_text(const std::string& path, const std::string& text) {
  AtomicFile file("output", path);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

}  // namespace tessera::train
