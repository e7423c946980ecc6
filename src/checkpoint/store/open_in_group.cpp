// Opens a checkpoint whose files may be on several hosts.

#include <algorithm>
#include <exception>
#include <filesystem>
#include <map>
#include <sstream>

#include <fmt/format.h>

#include "checkpoint/hosts/remote_files.h"
#include "checkpoint/store/checkpoint_impl.h"
#include "checkpoint/store/run_folder.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

/// The first rank that has a manifest; -1 if none has. Throws on all ranks if two differ.
int rank_with_manifest(ProcessGroup group, const std::string& path, const std::string& text) {
  const std::string mine =
      text.empty() ? "" : text.substr(text.size() - std::min<size_t>(text.size(), 64));
  const auto ends = group.all_gather_bytes(mine);
  int first = -1;
  for (size_t rank = 0; rank < ends.size(); ++rank) {
    if (ends[rank].empty()) continue;
    if (first < 0) first = static_cast<int>(rank);
    if (ends[rank] == ends[first]) continue;
    throw CheckpointDamagedError(
        fmt::format("checkpoint: {}/{}: ranks {} and {} have different ones; expected parts of one "
                    "checkpoint on the hosts",
                    path, store::kManifestName, first, rank));
  }
  return first;
}

}  // namespace

namespace store {

std::string common_version(ProcessGroup group, const std::string& path) {
  std::map<std::string, std::string> mine;  // by mark
  std::string marks;
  agree(group, [&] {
    for (const auto& version : versions_of(path)) {
      const std::string mark = mark_of(version);
      if (mine.emplace(mark, version).second) marks += mark + "\n";
    }
  });
  const auto ranks = group.all_gather_bytes(marks);
  for (const auto& rank : ranks) {
    std::istringstream lines(rank);
    for (std::string mark; std::getline(lines, mark);) {
      const bool common = std::all_of(ranks.begin(), ranks.end(), [&](const std::string& other) {
        return other.empty() || other.find(mark) != other.npos;
      });
      if (common && mark != "-") return mine[mark];
    }
  }
  return "";
}

void agree_undamaged(ProcessGroup group, const std::function<void()>& body) {
  std::exception_ptr failure;
  std::string kind;
  try {
    body();
  } catch (const CheckpointDamagedError&) {
    failure = std::current_exception(), kind = "damage";
  } catch (...) {
    failure = std::current_exception(), kind = "other";
  }
  std::string kinds;
  for (const auto& rank : group.all_gather_bytes(kind)) kinds += rank;
  if (kinds.empty()) return;
  try {
    agree(group, [&] {
      if (failure) std::rethrow_exception(failure);
    });
  } catch (const AgreedError& error) {
    if (kinds.find("other") != kinds.npos) throw;
    throw CheckpointDamagedError(error.what());
  }
}

}  // namespace store

Checkpoint::Impl::Impl(const std::string& folder, ProcessGroup group)
    : path(std::filesystem::path(folder).lexically_normal().string()),
      source(std::make_unique<store::FileSource>(group)) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  const std::string version = store::common_version(group, path);
  if (!version.empty()) path = version;
  std::string text;
  store::agree_undamaged(group, [&] { text = manifest_text(true); });
  const int first = rank_with_manifest(group, path, text);
  const auto lacking = group.all_gather_bytes(text.empty() ? "lacks it" : "");
  const bool all =
      std::all_of(lacking.begin(), lacking.end(), [](const auto& rank) { return rank.empty(); });
  if (first >= 0 && !all) text = group.broadcast_bytes(text, first);
  std::exception_ptr newer;
  const auto parse = [&] {
    if (first < 0) manifest_text(false);  // throws
    try {
      parse_manifest(text);
    } catch (const CheckpointVersionError&) {
      newer = std::current_exception();
      throw;
    }
  };
  try {
    store::agree_undamaged(group, parse);
  } catch (const AgreedError&) {
    if (newer) std::rethrow_exception(newer);  // on all ranks, because the text is one
    throw;
  }
  find_holders(std::move(group));
  index_slices();
}

/// Finds the ranks that have each file.
void Checkpoint::Impl::find_holders(ProcessGroup group) {
  std::string mine;  // "" if all files are here
  store::agree_undamaged(group, [&] {
    for (const auto& file : manifest.files) mine += check_file(file, true) ? '1' : '0';
    if (mine.find('0') == mine.npos) mine.clear();
  });
  const auto ranks = group.all_gather_bytes(mine);
  if (std::all_of(ranks.begin(), ranks.end(), [](const auto& rank) { return rank.empty(); }))
    return;
  std::vector<std::vector<int>> holders(manifest.files.size());
  for (size_t i = 0; i < holders.size(); ++i) {
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (ranks[rank].empty() || ranks[rank][i] == '1')
        holders[i].push_back(static_cast<int>(rank));
    if (!holders[i].empty()) continue;
    const auto& file = manifest.files[i];
    throw CheckpointDamagedError(fmt::format(
        "checkpoint: {}/{}: no host of this group has the file{}; expected the folder on the host "
        "that wrote it, or a copy of its files{}",
        path, file.name, writer_text(file), store::older_ones(path)));
  }
  source = std::make_unique<store::RemoteFiles>(
      std::move(group), std::move(holders),
      [this](size_t file, void* to, size_t count, uint64_t offset) -> int64_t {
        const auto opened_file = open_to_read(path + "/" + manifest.files[file].name);
        return opened_file ? opened_file.read_at(to, count, offset) : -1;
      });
}

}  // namespace tessera
