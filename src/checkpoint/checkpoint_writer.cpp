#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>

#include "checkpoint/atomic_file.h"
#include "checkpoint/run_folder.h"
#include "checkpoint/slice_file.h"
#include "checkpoint/store_impl.h"
#include "checkpoint/tensor_file.h"
#include "comm/agreement.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"

namespace tessera {

// [Note: committing] Each rank syncs its own files and tells rank 0 their sizes and digests. Rank 0 alone writes the
// manifest, and then renames the folder: whatever happens before, there is no checkpoint; whatever happens after, there
// is one.

struct CheckpointWriter::Impl {
  Impl(std::shared_ptr<CheckpointStore::Impl> of, int64_t at_step)
      : run(std::move(of)), group(run->group), step(at_step) {}

  void begin();
  void add(const std::string& file, const std::function<void()>& action);
  void check_new(const std::string& file) const;
  std::string finish();
  void publish(const std::vector<std::string>& records);
  void abandon() noexcept;

  std::shared_ptr<CheckpointStore::Impl> run;
  ProcessGroup group;
  int64_t step;
  std::string folder;   // the hidden one
  std::string problem;  // the first
  std::map<std::string, std::unique_ptr<store::TensorFile>> open;
  std::vector<store::FileRecord> records;
  bool over = false;
};

namespace {

/// While alive the group waits as long as disks may take.
class Patience {
 public:
  Patience(ProcessGroup group, std::chrono::milliseconds wait) : group_(std::move(group)), before_(group_.timeout()) {
    group_.set_timeout(std::max(before_, wait));
  }
  ~Patience() { group_.set_timeout(before_); }
  Patience(const Patience&) = delete;

 private:
  ProcessGroup group_;
  std::chrono::milliseconds before_;
};

uint64_t size_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    throw Error(fmt::format("checkpoint: {}: not seen by rank 0: {}; all ranks must write to one folder", path,
                            errno_text(errno)));
  }
  return static_cast<uint64_t>(status.st_size);
}

/// What all ranks wrote, under different names.
std::vector<store::FileRecord> gathered(const std::string& folder, const std::vector<std::string>& ranks) {
  std::vector<store::FileRecord> files;
  std::map<std::string, int> writers;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (auto& file : store::records_from_text(ranks[rank])) {
      file.rank = static_cast<int>(rank);
      const auto [other, fresh] = writers.emplace(file.name, file.rank);
      if (!fresh)
        throw UsageError(
            fmt::format("checkpoint: {}/{} is written by ranks {} and {}", folder, file.name, other->second, rank));
      files.push_back(std::move(file));
    }
  }
  return files;
}

/// Each is there, of the size that its writer says.
void check_files(const std::string& folder, const std::vector<store::FileRecord>& files) {
  for (const auto& file : files) {
    const uint64_t size = size_of(folder + "/" + file.name);
    if (size != file.bytes) {
      throw Error(fmt::format("checkpoint: {}/{} has {} bytes; rank {} wrote {}", folder, file.name, size, file.rank,
                              file.bytes));
    }
  }
}

}  // namespace

void CheckpointWriter::Impl::begin() {
  comm::agree(group, [&] {
    if (step < 0) throw UsageError(fmt::format("checkpoint: the step is {}; expected none below 0", step));
    if (group.rank() != 0) return;
    folder = run->folder + "/" + store::partial_name(step);
    if (::mkdir(folder.c_str(), 0777) != 0) {
      throw Error(fmt::format("checkpoint: {}: making the folder failed: {}", folder, errno_text(errno)));
    }
  });
  const std::string told = group.broadcast_bytes(std::filesystem::path(folder).filename().string(), 0);
  folder = run->folder + "/" + told;
  comm::agree(group, [&] {
    if (!store::is_partial_name(told) || told.rfind("." + store::step_name(step) + ".", 0) != 0) {
      throw UsageError(fmt::format("checkpoint: step {} here, while rank 0 writes {}", step, told));
    }
    size_of(folder);
  });
}

void CheckpointWriter::Impl::add(const std::string& file, const std::function<void()>& action) {
  if (over) throw UsageError("checkpoint: " + file + " is added after commit");
  if (!problem.empty()) return;
  try {
    action();
  } catch (const std::exception& error) {
    problem = comm::message_of(error);
    if (problem.empty()) problem = "checkpoint: " + folder + "/" + file + ": an error without a message";
  }
}

void CheckpointWriter::Impl::check_new(const std::string& file) const {
  store::check_file_name(file);
  const bool known = open.count(file) > 0 || std::any_of(records.begin(), records.end(),
                                                         [&](const auto& record) { return record.name == file; });
  if (known) throw UsageError("checkpoint: " + folder + "/" + file + " is added twice");
}

/// This rank's part is on disk; returns what rank 0 needs to know of it.
std::string CheckpointWriter::Impl::finish() {
  if (!problem.empty()) {
    open.clear();  // before the others know, and rank 0 removes the folder
    throw Error(problem);
  }
  for (auto& [name, file] : open) records.push_back(file->finish());
  open.clear();
  return store::records_to_text(records);
}

void CheckpointWriter::Impl::publish(const std::vector<std::string>& ranks) {
  const store::Manifest manifest{step, group.size(), gathered(folder, ranks)};
  check_files(folder, manifest.files);
  const std::string text = store::manifest_to_text(manifest);
  AtomicFile file("checkpoint", folder + "/" + store::kManifestName);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
  store::publish(run->folder, folder, step);
  try {
    const auto steps = store::committed_steps(run->folder);
    for (const int64_t old : store::expired(steps, step, run->options.keep_last, run->options.keep_every)) {
      store::retire(run->folder, old);
    }
  } catch (const Error& error) {
    throw Error(fmt::format("checkpoint: step {} is committed, but pruning older ones failed: {}", step, error.what()));
  }
}

/// After a failed commit rank 0 is alone in the folder. Writers that are given up without one may come here in any
/// order, while others still write: rank 0 takes away what there is, and the last one finds the folder empty.
void CheckpointWriter::Impl::abandon() noexcept {
  over = true;
  open.clear();
  if (folder.empty()) return;
  if (group.rank() != 0) {
    for (const auto& file : records) ::unlink((folder + "/" + file.name).c_str());
    ::rmdir(folder.c_str());
    return;
  }
  // Files that other ranks remove meanwhile end a round early.
  std::error_code error;
  for (int round = 0; round < 100; ++round) {
    std::filesystem::remove_all(folder, error);
    if (!std::filesystem::exists(folder, error)) return;
  }
}

CheckpointWriter::CheckpointWriter(const CheckpointStore& store, int64_t step)
    : impl_(std::make_unique<Impl>(store.impl_, step)) {
  try {
    impl_->begin();
  } catch (...) {
    impl_->abandon();
    throw;
  }
}

CheckpointWriter::~CheckpointWriter() {
  if (!impl_->over) impl_->abandon();
}

void CheckpointWriter::add_tensors(const std::string& file,
                                   const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                   const SafetensorsMetadata& metadata) {
  impl_->add(file, [&] {
    begin_tensors(file, store::specs_of(file, tensors), metadata);
    for (const auto& [name, tensor] : tensors) write_tensor(file, name, tensor);
    if (!impl_->problem.empty()) return;
    impl_->records.push_back(impl_->open.at(file)->finish());
    impl_->open.erase(file);
  });
}

void CheckpointWriter::begin_tensors(const std::string& file, std::vector<SafetensorsSpec> specs,
                                     const SafetensorsMetadata& metadata) {
  impl_->add(file, [&] {
    impl_->check_new(file);
    impl_->open.emplace(file, std::make_unique<store::TensorFile>(impl_->folder, file, std::move(specs), metadata));
  });
}

void CheckpointWriter::write_tensor(const std::string& file, const std::string& name, const at::Tensor& tensor) {
  impl_->add(file, [&] {
    const auto found = impl_->open.find(file);
    if (found == impl_->open.end()) throw UsageError("checkpoint: write_tensor: " + file + " was not begun");
    found->second->write(name, tensor);
  });
}

void CheckpointWriter::add_text(const std::string& file, const std::string& text) {
  impl_->add(file, [&] {
    impl_->check_new(file);
    impl_->records.push_back(store::write_text_file(impl_->folder, file, text));
  });
}

void CheckpointWriter::add_slices(const std::vector<StateSlice>& slices) {
  const std::string file = store::slice_file_name(impl_->group.rank(), impl_->group.size());
  impl_->add(file, [&] {
    auto contents = store::slice_file(slices);
    add_tensors(file, contents.tensors);
    if (impl_->problem.empty()) impl_->records.back().slices = std::move(contents.layout);
  });
}

std::string CheckpointWriter::commit() {
  Impl& impl = *impl_;
  if (impl.over) throw UsageError("checkpoint: commit: the writer of step " + std::to_string(impl.step) + " is done");
  const Patience patience(impl.group, impl.run->options.timeout);
  try {
    std::string records;
    comm::agree(impl.group, [&] { records = impl.finish(); });
    const auto all = impl.group.gather_bytes(records, 0);
    comm::agree(impl.group, [&] {
      if (impl.group.rank() == 0) impl.publish(all);
    });
  } catch (...) {
    impl.abandon();
    throw;
  }
  impl.over = true;
  return impl.run->folder + "/" + store::step_name(impl.step);
}

}  // namespace tessera
