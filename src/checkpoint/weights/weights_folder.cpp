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

[[noreturn]] void fail(const fs::path& path, const std::string& reason) {
  throw Error(fmt::format("weights: {}: the new weights are written, but {} failed: {}",
                          path.string(), reason, errno_text(errno)));
}

void remove_file(const fs::path& path) {
  if (uninterrupted([&] { return ::unlink(path.c_str()); }) != 0 && errno != ENOENT)
    fail(path, "removing this file of former ones");
}

/// The names of the parts in the folder, of any save.
std::vector<std::string> part_names(const std::string& folder) {
  static const std::regex pattern(R"(model(-[0-9a-f]{4})?-\d{5}-of-\d{5}\.safetensors)");
  auto names = list_folder(folder).value_or(std::vector<std::string>());
  std::erase_if(names, [](const std::string& name) { return !std::regex_match(name, pattern); });
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
  std::string tag;
  const auto used = [&](const WeightsPart& part) {
    return look_at("weights", (fs::path(folder) / with_tag(part.file, tag)).string()).has_value();
  };
  while (std::any_of(parts.begin(), parts.end(), used))
    tag = fmt::format("-{:04x}", std::random_device()() & 0xffff);
  return tag;
}

void finish_weights_folder(const std::string& folder, const std::vector<WeightsPart>& parts,
                           const std::string& index_text) {
  AtomicFile file("weights", (fs::path(folder) / kWeightsIndexName).string());
  file.write_at(index_text.data(), index_text.size(), 0);
  file.commit();
  remove_file(fs::path(folder) / kSingleName);
  for (const auto& name : part_names(folder)) {
    const bool ours = std::any_of(parts.begin(), parts.end(),
                                  [&](const WeightsPart& part) { return part.file == name; });
    if (!ours) remove_file(fs::path(folder) / name);
  }
  if (!sync_folder(folder))
    fail(folder, "syncing it, so that a loss of power may bring former ones back,");
}

}  // namespace tessera
