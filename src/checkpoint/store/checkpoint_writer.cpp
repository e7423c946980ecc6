#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "checkpoint/hosts/scoped_timeout.h"
#include "checkpoint/io/declared_tensors.h"
#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/store/commit_files.h"
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
  std::string folder;   // with the hidden name
  std::string problem;  // text of the first error
  std::map<std::string, std::unique_ptr<store::TensorFile>> open;
  std::vector<store::FileRecord> records;
  bool over = false;
  detail::OwnProcess process;
  // From the first file on, because the ranks' disks differ in speed.
  std::optional<store::ScopedTimeout> timeout;
};

void CheckpointWriter::Impl::begin() {
  const std::string name =
      group.broadcast_bytes(store::partial_name(std::max<int64_t>(step, 0)), 0);
  agree(group, [&] {
    if (step < 0)
      throw UsageError(fmt::format("checkpoint: the step is {}; expected 0 or more", step));
    if (!store::is_partial_name(name) || name.rfind("." + store::step_name(step) + ".", 0) != 0) {
      throw UsageError(
          fmt::format("checkpoint: the step is {} here; rank 0 writes {}", step, name));
    }
    folder = run->folder + "/" + name;
    if (run->leads() && uninterrupted([&] { return ::mkdir(folder.c_str(), 0777); }) != 0) {
      throw Error(
          fmt::format("checkpoint: {}: making the folder failed: {}", folder, errno_text(errno)));
    }
  });
  agree(group, [&] { store::size_seen(folder); });
  timeout.emplace(group, run->options.timeout);
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
  if (file == store::kUnsoundName) {
    throw UsageError("checkpoint: " + folder + "/" + file +
                     ": this name marks checkpoints with elements that are not finite; expected "
                     "another name");
  }
  const bool known =
      open.count(file) > 0 || std::any_of(records.begin(), records.end(),
                                          [&](const auto& record) { return record.name == file; });
  if (known) throw UsageError("checkpoint: " + folder + "/" + file + " is added twice");
}

/// Finishes this rank's files on disk and returns their records for rank 0.
std::string CheckpointWriter::Impl::finish() {
  if (!problem.empty()) {
    open.clear();  // before the other ranks get the error and rank 0 removes the folder
    throw Error(problem);
  }
  for (auto& [name, file] : open) records.push_back(file->finish());
  open.clear();
  return store::records_to_text(records);
}

/// After a failed commit only the leaders of the places still use the folder. Writers that are
/// destroyed without a commit may come here in any order while other ranks still write. Then a
/// leader removes the files that exist, and every other rank removes its own files and, if it is
/// empty, the folder.
void CheckpointWriter::Impl::abandon() noexcept {
  over = true;
  timeout.reset();
  open.clear();
  if (folder.empty()) return;
  if (!run->leads()) {
    for (const auto& file : records) ::unlink((folder + "/" + file.name).c_str());
    ::rmdir(folder.c_str());
    return;
  }
  // remove_all() stops when another rank removes a file at the same time, so it is repeated.
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
  if (!impl_->over && impl_->process.is_this()) impl_->abandon();
}

void CheckpointWriter::add_tensors(const std::string& file,
                                   const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                   const SafetensorsMetadata& metadata) {
  impl_->add(file, [&] {
    begin_tensors(file, specs_of("checkpoint: " + file + ": ", tensors), metadata);
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

void CheckpointWriter::add_slices(const std::vector<StateSlice>& slices, const std::string& set) {
  const std::string file = store::slice_file_name(set, impl_->group.rank(), impl_->group.size());
  impl_->add(file, [&] {
    auto contents = store::slice_file(set, slices);
    add_tensors(file, contents.tensors);
    if (!impl_->problem.empty()) return;
    impl_->records.back().slice_set = set;
    impl_->records.back().slices = std::move(contents.layout);
  });
}

std::string CheckpointWriter::commit(const std::vector<int64_t>& keep) {
  Impl& impl = *impl_;
  if (impl.over)
    throw UsageError("checkpoint: commit: the writer of step " + std::to_string(impl.step) +
                     " has committed or failed before");
  try {
    std::string records;
    agree(impl.group, [&] { records = impl.finish(); });
    const auto all = impl.group.gather_bytes(records, 0);
    store::commit_files(*impl.run, impl.folder, impl.step, all, keep);
  } catch (...) {
    impl.abandon();
    throw;
  }
  impl.over = true;
  impl.timeout.reset();
  return impl.run->folder + "/" + store::step_name(impl.step);
}

}  // namespace tessera
