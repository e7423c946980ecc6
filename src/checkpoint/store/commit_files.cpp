#include "checkpoint/store/commit_files.h"

#include <cerrno>
#include <map>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/store/manifest.h"
#include "checkpoint/store/run_folder.h"
#include "checkpoint/store/tensor_file.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera::store {

// [Note: committing] Each rank syncs its own files and sends their sizes and digests to rank 0,
// which composes the manifest. The leader of each place writes the manifest there and then renames
// the folder. After a failure before the rename there is no checkpoint; after a later failure it is
// complete. With several places the checkpoint is complete after the last rename. Leaders rename
// only after all have written the manifest. They remove older and replaced checkpoints only after
// all have renamed and synced: until then the older one is complete in every place.

namespace {

/// The records of all ranks. Throws UsageError if two ranks wrote files of the same name.
std::vector<FileRecord> gathered(const std::string& folder, const std::vector<std::string>& ranks,
                                 const std::vector<std::string>& hosts) {
  std::vector<FileRecord> files;
  std::map<std::string, int> writers;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (auto& file : records_from_text(ranks[rank])) {
      file.rank = static_cast<int>(rank);
      file.host = hosts[rank];
      const auto [other, fresh] = writers.emplace(file.name, file.rank);
      if (!fresh) {
        throw UsageError(fmt::format("checkpoint: {}/{} is written by ranks {} and {}", folder,
                                     file.name, other->second, rank));
      }
      files.push_back(std::move(file));
    }
  }
  return files;
}

/// Checks that each file of this place exists with the size that its writer reported.
void check_files(const std::string& folder, const std::vector<FileRecord>& files,
                 const FolderPlaces& places, int leader) {
  for (const auto& file : files) {
    if (places.leaders[file.rank] != leader) continue;
    const uint64_t size = size_seen(folder + "/" + file.name);
    if (size != file.bytes) {
      throw Error(fmt::format("checkpoint: {}/{} has {} bytes; rank {} wrote {}", folder, file.name,
                              size, file.rank, file.bytes));
    }
  }
}

void write_manifest(const std::string& folder, const std::string& text) {
  AtomicFile file("checkpoint", folder + "/" + kManifestName);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

/// Removes the checkpoints that step `written` replaces or makes superfluous. A failure does not
/// affect the new checkpoint, so it is only logged.
void prune(const std::string& folder, int64_t written, const CheckpointStoreOptions& options,
           const std::vector<int64_t>& keep) {
  try {
    settle_replaced(folder, written);
    const auto steps = committed_steps(folder);
    for (const int64_t old : expired(steps, written, options.keep_last, options.keep_every,
                                     unsound_steps(folder, steps), keep))
      remove_checkpoint(folder, old);
  } catch (const std::exception& error) {
    spdlog::warn("tessera: checkpoint: step {} is committed, but pruning older ones failed: {}",
                 written, error.what());
  }
}

/// Writes the file that marks an unsound checkpoint. Every place has one; the record is rank 0's.
void mark_if_unsound(const std::string& folder, const std::string& host,
                     std::vector<FileRecord>& files) {
  const std::string text = unsound_text(files);
  if (text.empty()) return;
  files.push_back(write_text_file(folder, kUnsoundName, text));
  files.back().host = host;
}

/// The text of the manifest: composed on rank 0, and sent to the other ranks if they need it.
std::string agreed_manifest(const CheckpointStore::Impl& run, const std::string& folder,
                            int64_t step, const std::vector<std::string>& records) {
  ProcessGroup group = run.group;
  std::string text;
  agree(group, [&] {
    if (group.rank() != 0) return;
    Manifest manifest{step, group.size(), gathered(folder, records, run.places.hosts),
                      run.places.save_id(folder)};
    mark_if_unsound(folder, run.places.hosts[0], manifest.files);
    text = manifest_to_text(manifest);
  });
  return run.places.on_leaders(group, text);
}

/// Writes the files that the rename of this place's folder makes final.
void prepare_place(const CheckpointStore::Impl& run, const std::string& folder,
                   const std::string& text) {
  const Manifest manifest = manifest_from_text(text);
  const int leader = run.group.rank();
  if (leader != 0) {
    const std::string unsound = unsound_text(manifest.files);
    if (!unsound.empty()) write_text_file(folder, kUnsoundName, unsound);
  }
  check_files(folder, manifest.files, run.places, leader);
  write_manifest(folder, text);
  run.lock.check_held();
}

}  // namespace

uint64_t size_seen(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw Error(fmt::format("checkpoint: {}: another rank made it, but this rank cannot see it: {}",
                            path, errno_text(errno)));
  }
  return static_cast<uint64_t>(status.st_size);
}

void commit_files(const CheckpointStore::Impl& run, const std::string& folder, int64_t step,
                  const std::vector<std::string>& records, const std::vector<int64_t>& keep) {
  const std::string text = agreed_manifest(run, folder, step, records);
  agree(run.group, [&] {
    if (run.leads()) prepare_place(run, folder, text);
  });
  std::string replaced;
  bool published = false;
  try {
    agree(run.group, [&] {
      if (!run.leads()) return;
      replaced = publish(run.folder, folder, step);
      published = true;
    });
  } catch (const AgreedError&) {
    if (published) unpublish(run.folder, step, replaced);  // another place could not
    throw;
  }
  agree(run.group, [&] {
    try {
      if (run.leads()) sync_run(run.folder);
    } catch (const Error& error) {
      throw Error(fmt::format(
          "checkpoint: step {} is committed, but a loss of power may undo it, so that no older "
          "one was removed: {}",
          step, error.what()));
    }
  });
  agree(run.group, [&] {
    if (run.leads()) prune(run.folder, step, run.options, keep);
  });
}

}  // namespace tessera::store
