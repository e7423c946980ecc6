#include "checkpoint/weights/weights_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <regex>

#include <unistd.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"
#include "tessera/save_weights.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSingleName = "model.safetensors";

void remove_file(const fs::path& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT)
    throw Error("weights: " + path.string() + ": removing it failed: " + errno_text(errno));
}

/// The names of the parts in the folder, of any save.
std::vector<std::string> part_names(const std::string& folder) {
  static const std::regex pattern(R"(model-\d{5}-of-\d{5}\.safetensors)");
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (std::regex_match(name, pattern)) names.push_back(name);
  }
  return names;
}

}  // namespace

std::vector<std::string> weights_files_of(const std::string& folder) {
  std::vector<std::string> names = part_names(folder);
  names.insert(names.end(), {kWeightsIndexName, kSingleName});
  for (auto& name : names) name = (fs::path(folder) / name).string();
  return names;
}

void begin_weights_folder(const std::string& folder) {
  remove_file(fs::path(folder) / kWeightsIndexName);
  remove_file(fs::path(folder) / kSingleName);
}

void finish_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts,
                           const std::string& index_text) {
  AtomicFile file("weights", (fs::path(folder) / kWeightsIndexName).string());
  file.write_at(index_text.data(), index_text.size(), 0);
  file.commit();
  for (const auto& name : part_names(folder)) {
    const bool ours = std::any_of(parts.begin(), parts.end(),
                                  [&](const WeightsPart& part) { return part.file == name; });
    if (!ours) remove_file(fs::path(folder) / name);
  }
}

}  // namespace tessera
