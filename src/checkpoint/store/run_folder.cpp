#include "checkpoint/store/run_folder.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "checkpoint/hosts/folder_places.h"
#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kPartial = ".partial-";

[[noreturn]] void refuse(const std::string& path, const std::string& action, int error) {
  throw Error(fmt::format("checkpoint: {}: {} failed: {}", path, action, errno_text(error)));
}

std::vector<std::string> names_in(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    names.push_back(entries->path().filename().string());
  }
  if (error == std::errc::no_such_file_or_directory) return {};
  if (error) refuse(folder, "listing the folder", error.value());
  return names;
}

void rename_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) refuse(from, "renaming it to " + to, errno);
}

}  // namespace

std::string without_trailing_slashes(std::string folder) {
  while (folder.size() > 1 && folder.back() == '/') folder.pop_back();
  return folder;
}

std::string step_name(int64_t step) { return fmt::format("{}{:08d}", kStep, step); }

std::optional<int64_t> step_of_name(std::string_view name) {
  int64_t step = -1;
  if (name.substr(0, kStep.size()) != kStep) return std::nullopt;
  const auto [end, error] =
      std::from_chars(name.data() + kStep.size(), name.data() + name.size(), step);
  if (error != std::errc() || step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

std::string partial_name(int64_t step) {
  std::random_device random;
  return fmt::format(".{}{}{:08x}{:08x}", step_name(step), kPartial, random(), random());
}

bool is_partial_name(std::string_view name) {
  const size_t at = name.find(kPartial);
  return at != std::string_view::npos && name[0] == '.' &&
         step_of_name(name.substr(1, at - 1)).has_value();
}

std::vector<int64_t> committed_steps(const std::string& folder) {
  std::vector<int64_t> steps;
  for (const auto& name : names_in(folder)) {
    std::error_code ignored;
    const auto step = step_of_name(name);
    if (step && fs::is_directory(fs::path(folder) / name, ignored)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::set<int64_t> unsound_steps(const std::string& folder, const std::vector<int64_t>& steps) {
  std::set<int64_t> unsound;
  for (const int64_t step : steps) {
    std::error_code ignored;
    if (fs::exists(fs::path(folder) / step_name(step) / kUnsoundName, ignored))
      unsound.insert(step);
  }
  return unsound;
}

std::vector<int64_t> expired(const std::vector<int64_t>& steps, int64_t written, int keep_last,
                             int64_t keep_every, const std::set<int64_t>& unsound) {
  std::vector<int64_t> old;
  int sound = 0, bad = 0;  // numbers of later checkpoints
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const bool good = unsound.count(*step) == 0;
    const bool multiple = keep_every > 0 && *step % keep_every == 0;
    const bool kept = good ? sound < keep_last || multiple : sound == 0 && bad < keep_last;
    ++(good ? sound : bad);
    if (!kept && *step != written) old.push_back(*step);
  }
  std::reverse(old.begin(), old.end());
  return old;
}

void remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) refuse(path, "removing it", error.value());
}

void sync_folder(const std::string& folder) {
  const FileDescriptor file(
      ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot sync a folder and return EINVAL. Nothing more can be done on those.
  if (!file || (::fsync(file.get()) != 0 && errno != EINVAL))
    refuse(folder.empty() ? "." : folder, "syncing the folder", errno);
}

void make_folder(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> made;
  for (fs::path path = folder;
       !path.empty() && !fs::exists(path, error) && path != path.parent_path();
       path = path.parent_path()) {
    made.push_back(path);
  }
  fs::create_directories(folder, error);
  if (error) refuse(folder, "making the folder", error.value());
  for (const auto& path : made) sync_folder(path.parent_path().string());
}

std::string publish(const std::string& folder, const std::string& partial, int64_t step) {
  const std::string target = folder + "/" + step_name(step);
  std::string replaced;
  if (::rename(partial.c_str(), target.c_str()) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) refuse(partial, "renaming it to " + target, errno);
    // A checkpoint of this step exists. The two are exchanged in one step if the file system can.
    replaced = partial;
    if (::renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
      replaced = folder + "/" + partial_name(step);
      rename_folder(target, replaced);
      rename_folder(partial, target);
    }
  }
  sync_folder(folder);
  return replaced;
}

void unpublish(const std::string& folder, int64_t step, const std::string& replaced) {
  remove_checkpoint(folder, step);
  if (replaced.empty()) return;
  rename_folder(replaced, folder + "/" + step_name(step));
  sync_folder(folder);
}

void remove_checkpoint(const std::string& folder, int64_t step) {
  const std::string old = folder + "/" + partial_name(step);
  rename_folder(folder + "/" + step_name(step), old);
  sync_folder(folder);
  remove_tree(old);
}

void remove_leftovers(const std::string& folder) {
  for (const auto& name : names_in(folder)) {
    if (is_partial_name(name) || name.rfind(kPlacePrefix, 0) == 0) remove_tree(folder + "/" + name);
  }
}

}  // namespace tessera::store
