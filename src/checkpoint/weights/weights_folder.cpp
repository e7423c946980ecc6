#include "checkpoint/weights/weights_folder.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <random>
#include <regex>

#include <fmt/format.h>
#include <unistd.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/save_weights.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

constexpr const char* kSingleName = "model.safetensors";

void remove_file(const fs::path& path) {
  if (uninterrupted([&] { return ::unlink(path.c_str()); }) != 0 && errno != ENOENT)
    throw Error("weights: " + path.string() +
                ": the new weights are written, but removing this file of former ones failed: " +
                errno_text(errno));
}

/// The names of the parts in the folder, of any save.
std::vector<std::string> part_names(const std::string& folder) {
  static const std::regex pattern(R"(model(-[0-9a-f]{4})?-\d{5}-of-\d{5}\.safetensors)");
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

std::string make_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts) {
  if (std::error_code error = make_folder(folder))
    throw UsageError("weights: " + folder + ": cannot make the folder: " + error.message());
  const bool used = std::any_of(parts.begin(), parts.end(), [&](const WeightsPart& part) {
    std::error_code error;
    return fs::exists(fs::path(folder) / part.file, error) || error;
  });
  return used ? fmt::format("-{:04x}", std::random_device()() & 0xffff) : "";
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
  remove_file(fs::path(folder) / kSingleName);
  sync_folder(folder);
}

}  // namespace tessera
