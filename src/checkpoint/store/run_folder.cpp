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
#include "checkpoint/store/manifest.h"
#include "tessera/detail/folders.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kStep = "step-";
constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kReplaced = ".replaced-";

[[noreturn]] void refuse(const std::string& path, const std::string& action, int error) {
  throw Error(fmt::format("checkpoint: {}: {} failed: {}", path, action, errno_text(error)));
}

std::vector<std::string> names_in(const std::string& folder) {
  const auto names = list_folder(folder);
  if (!names && errno != ENOENT) refuse(folder, "listing the folder", errno);
  return names ? *names : std::vector<std::string>();
}

int rename_path(const std::string& from, const std::string& to) {
  return uninterrupted([&] { return ::rename(from.c_str(), to.c_str()); });
}

void rename_folder(const std::string& from, const std::string& to) {
  if (rename_path(from, to) != 0) refuse(from, "renaming it to " + to, errno);
}

std::optional<struct stat> look_at(const std::string& path) {
  return tessera::look_at("checkpoint", path);
}
bool is_there(const std::string& path) { return look_at(path).has_value(); }

/// The step of ".step-00000120.partial-9c1e", where `kind` is ".partial-".
std::optional<int64_t> step_of_hidden(std::string_view name, std::string_view kind) {
  const size_t at = name.find(kind);
  if (at == std::string_view::npos || name[0] != '.') return std::nullopt;
  return step_of_name(name.substr(1, at - 1));
}

std::string hidden_name(int64_t step, std::string_view kind) {
  std::random_device random;
  return fmt::format(".{}{}{:08x}{:08x}", step_name(step), kind, random(), random());
}

/// The time of the last change of a file, or in a folder of files.
time_t last_change(const std::string& path) {
  const auto status = look_at(path);
  time_t last = status ? status->st_mtime : 0;
  if (!status || !S_ISDIR(status->st_mode)) return last;
  for (const auto& name : names_in(path)) last = std::max(last, last_change(path + "/" + name));
  return last;
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

std::string partial_name(int64_t step) { return hidden_name(step, kPartial); }
bool is_partial_name(std::string_view name) { return step_of_hidden(name, kPartial).has_value(); }

std::vector<std::string> versions_of(const std::string& path) {
  std::vector<std::string> versions;
  const fs::path own(path);
  const auto step = step_of_name(own.filename().string());
  const fs::path parent = own.has_parent_path() ? own.parent_path() : ".";
  if (is_there(path)) versions.push_back(path);
  if (!step) return versions;
  for (const auto& name : names_in(parent.string()))
    if (step_of_hidden(name, kReplaced) == step) versions.push_back((parent / name).string());
  return versions;
}

std::string readable_version(const std::string& path) {
  if (is_there(path)) return path;
  const auto replaced = versions_of(path);
  return replaced.empty() ? path : replaced.front();
}

std::string mark_of(const std::string& path) {
  const std::string name = path + "/" + kManifestName;
  std::string text(40, '\0');
  const auto status = look_at(name);
  if (!status || status->st_size < static_cast<off_t>(text.size())) return "-";
  const FileDescriptor file = open_to_read(name);
  const auto begin = static_cast<uint64_t>(status->st_size) - text.size();
  if (file.read_at(text.data(), text.size(), begin) < 0) refuse(name, "reading it", errno);
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c <= ' '; }, '_');
  return text;
}

std::vector<int64_t> committed_steps(const std::string& folder) {
  std::set<int64_t> steps;
  for (const auto& name : names_in(folder)) {
    const auto step = name[0] == '.' ? step_of_hidden(name, kReplaced) : step_of_name(name);
    const auto status = step ? look_at(folder + "/" + name) : std::nullopt;
    if (status && S_ISDIR(status->st_mode)) steps.insert(*step);
  }
  return {steps.begin(), steps.end()};
}

std::set<int64_t> unsound_steps(const std::string& folder, const std::vector<int64_t>& steps) {
  std::set<int64_t> unsound;
  for (const int64_t step : steps)
    if (is_there(readable_version(folder + "/" + step_name(step)) + "/" + kUnsoundName))
      unsound.insert(step);
  return unsound;
}

std::vector<int64_t> expired(const std::vector<int64_t>& steps, int64_t written, int keep_last,
                             int64_t keep_every, const std::set<int64_t>& unsound,
                             const std::vector<int64_t>& keep) {
  std::vector<int64_t> old;
  int sound = 0, bad = 0;  // numbers of later checkpoints
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    const bool good = unsound.count(*step) == 0;
    const bool multiple = keep_every > 0 && *step % keep_every == 0;
    const bool wanted =
        *step == written || std::find(keep.begin(), keep.end(), *step) != keep.end();
    const bool kept =
        wanted || (good ? sound < keep_last || multiple : sound == 0 && bad < keep_last);
    ++(good ? sound : bad);
    if (!kept) old.push_back(*step);
  }
  std::reverse(old.begin(), old.end());
  return old;
}

void remove_tree(const std::string& path) {
  if (const auto error = detail::remove_all(path)) refuse(path, "removing it", error.value());
}

void sync_run(const std::string& folder) {
  if (!sync_folder(folder)) refuse(folder, "syncing the folder", errno);
}

std::string publish(const std::string& folder, const std::string& partial, int64_t step) {
  const std::string target = folder + "/" + step_name(step);
  if (rename_path(partial, target) == 0) return "";
  if (errno != ENOTEMPTY && errno != EEXIST) refuse(partial, "renaming it to " + target, errno);
  // A checkpoint of this step exists. The two are exchanged in one step if the file system can.
  const std::string replaced = folder + "/" + hidden_name(step, kReplaced);
  rename_folder(partial, replaced);
  if (uninterrupted([&] {
        return ::renameat2(AT_FDCWD, replaced.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE);
      }) == 0)
    return replaced;
  rename_folder(replaced, partial);
  rename_folder(target, replaced);
  if (rename_path(partial, target) == 0) return replaced;
  const int error = errno;
  rename_folder(replaced, target);
  refuse(partial, "renaming it to " + target, error);
}

void unpublish(const std::string& folder, int64_t step, const std::string& replaced) {
  const std::string own = folder + "/" + step_name(step), gone = folder + "/" + partial_name(step);
  rename_folder(own, gone);
  if (!replaced.empty()) rename_folder(replaced, own);
  sync_run(folder);
  remove_tree(gone);
}

void settle_replaced(const std::string& folder, std::optional<int64_t> only) {
  for (const auto& name : names_in(folder)) {
    const auto step = step_of_hidden(name, kReplaced);
    if (!step || (only && *only != *step)) continue;
    const std::string own = folder + "/" + step_name(*step),
                      gone = folder + "/" + partial_name(*step);
    const bool needless = is_there(own);
    rename_folder(folder + "/" + name, needless ? gone : own);
    if (needless) remove_tree(gone);
  }
}

void remove_checkpoint(const std::string& folder, int64_t step) {
  settle_replaced(folder, step);
  unpublish(folder, step, "");
}

void remove_leftovers(const std::string& folder, bool all) {
  constexpr time_t kAbandoned = 3600;
  const time_t now = last_change(folder + "/.lock");  // just written: the file system's time
  for (const auto& name : names_in(folder)) {
    const std::string path = folder + "/" + name;
    if (!is_partial_name(name) && name.rfind(kPlacePrefix, 0) != 0) continue;
    if (all || now - last_change(path) > kAbandoned) remove_tree(path);
  }
}

}  // namespace tessera::store
