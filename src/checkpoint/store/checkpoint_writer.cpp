#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/store/committing.h"
#include "checkpoint/store/run_folder.h"
#include "checkpoint/store/slice_file.h"
#include "checkpoint/store/tensor_file.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

struct CheckpointWriter::Impl {
  Impl(std::shared_ptr<CheckpointStore::Impl> of, int64_t at_step)
      : run(std::move(of)), group(run->group), step(at_step) {}

  void begin();
  void add(const std::string& file, const std::function<void()>& action);
  void check_new(const std::string& file) const;
  std::string finish();
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
class ScopedTimeout {
 public:
  ScopedTimeout(ProcessGroup group, std::chrono::milliseconds wait)
      : group_(std::move(group)), before_(group_.timeout()) {
    group_.set_timeout(std::max(before_, wait));
  }
  ~ScopedTimeout() { group_.set_timeout(before_); }
  ScopedTimeout(const ScopedTimeout&) = delete;

 private:
  ProcessGroup group_;
  std::chrono::milliseconds before_;
};

}  // namespace

void CheckpointWriter::Impl::begin() {
  agree(group, [&] {
    if (step < 0)
      throw UsageError(fmt::format("checkpoint: the step is {}; expected none below 0", step));
    if (group.rank() != 0) return;
    folder = run->folder + "/" + store::partial_name(step);
    if (::mkdir(folder.c_str(), 0777) != 0) {
      throw Error(
          fmt::format("checkpoint: {}: making the folder failed: {}", folder, errno_text(errno)));
    }
  });
  const std::string told =
      group.broadcast_bytes(std::filesystem::path(folder).filename().string(), 0);
  folder = run->folder + "/" + told;
  agree(group, [&] {
    if (!store::is_partial_name(told) || told.rfind("." + store::step_name(step) + ".", 0) != 0) {
      throw UsageError(fmt::format("checkpoint: step {} here, while rank 0 writes {}", step, told));
    }
    store::size_seen(folder);
  });
}

void CheckpointWriter::Impl::add(const std::string& file, const std::function<void()>& action) {
  if (over) throw UsageError("checkpoint: " + file + " is added after commit");
  if (!problem.empty()) return;
  try {
    action();
  } catch (const std::exception& error) {
    problem = message_of(error);
    if (problem.empty())
      problem = "checkpoint: " + folder + "/" + file + ": an error without a message";
  }
}

void CheckpointWriter::Impl::check_new(const std::string& file) const {
  store::check_file_name(file);
  const bool known =
      open.count(file) > 0 || std::any_of(records.begin(), records.end(),
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

/// After a failed commit rank 0 is alone in the folder. Writers that are given up without one may
/// come here in any order, while others still write: rank 0 takes away what there is, and the last
/// one finds the folder empty.
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
    impl_->open.emplace(
        file, std::make_unique<store::TensorFile>(impl_->folder, file, std::move(specs), metadata));
  });
}

void CheckpointWriter::write_tensor(const std::string& file, const std::string& name,
                                    const at::Tensor& tensor) {
  impl_->add(file, [&] {
    const auto found = impl_->open.find(file);
    if (found == impl_->open.end())
      throw UsageError("checkpoint: write_tensor: " + file + " was not begun");
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
  if (impl.over)
    throw UsageError("checkpoint: commit: the writer of step " + std::to_string(impl.step) +
                     " is done");
  const ScopedTimeout timeout(impl.group, impl.run->options.timeout);
  try {
    std::string records;
    agree(impl.group, [&] { records = impl.finish(); });
    const auto all = impl.group.gather_bytes(records, 0);
    agree(impl.group, [&] {
      if (impl.group.rank() == 0) store::commit_files(*impl.run, impl.folder, impl.step, all);
    });
  } catch (...) {
    impl.abandon();
    throw;
  }
  impl.over = true;
  return impl.run->folder + "/" + store::step_name(impl.step);
}

}  // namespace tessera
