#include "checkpoint/hosts/folder_places.h"

#include <cerrno>
#include <charconv>
#include <filesystem>
#include <random>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "checkpoint/io/file_descriptor.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::store {
namespace {

/// The lowest rank whose file is in `folder`; -1 if there is none.
int lowest_seen(const std::string& folder, const std::string& prefix) {
  int lowest = -1;
  const auto names = list_folder(folder);
  if (!names)
    throw Error(fmt::format("checkpoint: {}: cannot be listed: {}", folder, errno_text(errno)));
  for (const auto& name : *names) {
    if (name.rfind(prefix, 0) != 0) continue;
    int rank = -1;
    std::from_chars(name.data() + prefix.size(), name.data() + name.size(), rank);
    if (rank >= 0 && (lowest < 0 || rank < lowest)) lowest = rank;
  }
  return lowest;
}

}  // namespace

std::string FolderPlaces::save_id(const std::string& partial) const {
  return shared() ? "" : std::filesystem::path(partial).extension().string();
}

std::string FolderPlaces::on_leaders(ProcessGroup group, const std::string& text) const {
  return shared() ? text : group.broadcast_bytes(text, 0);
}

FolderPlaces find_places(ProcessGroup group, const std::string& folder) {
  std::random_device random;
  const std::string prefix =
      kPlacePrefix + group.broadcast_bytes(fmt::format("{:08x}{:08x}", random(), random()), 0) +
      "-";
  const std::string own = folder + "/" + prefix + std::to_string(group.rank());
  const auto remove = [&] { uninterrupted([&] { return ::unlink(own.c_str()); }); };
  int lowest = -1;
  try {
    agree(group, [&] {
      const FileDescriptor file(uninterrupted(
          [&] { return ::open(own.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666); }));
      if (!file)
        throw UsageError(
            fmt::format("checkpoint: {}: making it failed: {}", own, errno_text(errno)));
    });
    agree(group, [&] {
      lowest = lowest_seen(folder, prefix);
      if (lowest < 0) throw Error("checkpoint: " + own + ": another process has removed it");
    });
  } catch (...) {
    remove();
    throw;
  }
  remove();
  FolderPlaces places;
  for (const auto& text : group.all_gather_bytes(std::to_string(lowest) + " " + own_host())) {
    places.leaders.push_back(std::stoi(text));
    places.hosts.push_back(text.substr(text.find(' ') + 1));
  }
  return places;
}

}  // namespace tessera::store
