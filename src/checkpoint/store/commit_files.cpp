#include "checkpoint/store/commit_files.h"

#include <cerrno>
#include <map>

#include <fmt/format.h>
#include <sys/stat.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/store/manifest.h"
#include "checkpoint/store/run_folder.h"
#include "checkpoint/store/tensor_file.h"
#include "tessera/error.h"

namespace tessera::store {

// [Note: committing] Each rank syncs its own files and sends their sizes and digests to rank 0.
// Only rank 0 writes the manifest and then renames the folder. After a failure before the rename
// there is no checkpoint; after a failure behind it the checkpoint is complete.

namespace {

/// The records of all ranks. Throws UsageError if two ranks wrote files of the same name.
std::vector<FileRecord> gathered(const std::string& folder, const std::vector<std::string>& ranks) {
  std::vector<FileRecord> files;
  std::map<std::string, int> writers;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (auto& file : records_from_text(ranks[rank])) {
      file.rank = static_cast<int>(rank);
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

/// Checks that each file exists with the size that its writer reported.
void check_files(const std::string& folder, const std::vector<FileRecord>& files) {
  for (const auto& file : files) {
    const uint64_t size = size_seen(folder + "/" + file.name);
    if (size != file.bytes) {
      throw Error(fmt::format("checkpoint: {}/{} has {} bytes; rank {} wrote {}", folder, file.name,
                              size, file.rank, file.bytes));
    }
  }
}

void write_manifest(const std::string& folder, const Manifest& manifest) {
  const std::string text = manifest_to_text(manifest);
  AtomicFile file("checkpoint", folder + "/" + kManifestName);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
}

void prune(const std::string& folder, int64_t written, const CheckpointStoreOptions& options) {
  const auto steps = committed_steps(folder);
  for (const int64_t old : expired(steps, written, options.keep_last, options.keep_every,
                                   unsound_steps(folder, steps))) {
    remove_checkpoint(folder, old);
  }
}

/// Writes the file that marks an unsound checkpoint.
void mark_if_unsound(const std::string& folder, std::vector<FileRecord>& files) {
  const std::string text = unsound_text(files);
  if (!text.empty()) files.push_back(write_text_file(folder, kUnsoundName, text));
}

}  // namespace

uint64_t size_seen(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw Error(fmt::format(
        "checkpoint: {}: another rank made it, but this rank cannot see it: {}; all ranks must use "
        "the same folder",
        path, errno_text(errno)));
  }
  return static_cast<uint64_t>(status.st_size);
}

void commit_files(const CheckpointStore::Impl& run, const std::string& folder, int64_t step,
                  const std::vector<std::string>& records) {
  Manifest manifest{step, run.group.size(), gathered(folder, records)};
  mark_if_unsound(folder, manifest.files);
  check_files(folder, manifest.files);
  write_manifest(folder, manifest);
  run.lock.check_held();
  const std::string replaced = publish(run.folder, folder, step);
  try {
    if (!replaced.empty()) remove_tree(replaced);
    prune(run.folder, step, run.options);
  } catch (const Error& error) {
    throw Error(fmt::format("checkpoint: step {} is committed, but pruning older ones failed: {}",
                            step, error.what()));
  }
}

}  // namespace tessera::store
