#include "checkpoint/store/checkpoint_impl.h"

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include <fmt/format.h>

#include "checkpoint/io/digest.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/store/run_folder.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {

namespace fs = std::filesystem;
using safetensors::in_quotes;
using store::FileRecord;

namespace {

/// Sets `size` and returns 0, or returns an errno: -1 for anything but a regular file.
int size_of_file(const std::string& path, uint64_t& size) {
  const auto status = look_at("checkpoint", path);
  if (!status) return ENOENT;
  if (!S_ISREG(status->st_mode)) return -1;
  size = static_cast<uint64_t>(status->st_size);
  return 0;
}

size_t number_of(const store::Manifest& manifest, const FileRecord& file) {
  return static_cast<size_t>(&file - manifest.files.data());
}

}  // namespace

Checkpoint::Impl::Impl(const std::string& folder)
    : path(fs::path(folder).lexically_normal().string()),
      source(std::make_unique<store::FileSource>(ProcessGroup())) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  path = store::readable_version(path);
  parse_manifest(manifest_text(false));
  for (const FileRecord& file : manifest.files) check_file(file, false);
  index_slices();
}

std::string store::older_ones(const std::string& path) {
  const fs::path self(path);
  const auto own = store::step_of_name(self.filename().string());
  if (!own) return "";
  const std::string parent = self.has_parent_path() ? self.parent_path().string() : ".";
  std::string names;
  for (const int64_t step : store::committed_steps(parent))
    if (step < *own) names = store::step_name(step) + (names.empty() ? "" : ", ") + names;
  return names.empty() ? "; there is no older checkpoint in " + parent
                       : fmt::format("; older checkpoints in {}: {}", parent, names);
}

void Checkpoint::Impl::damaged(const std::string& file, const std::string& tensor,
                               const std::string& reason) const {
  throw CheckpointDamagedError(fmt::format(
      "checkpoint: {}{}: {}{}{}", path, file.empty() ? "" : "/" + file,
      tensor.empty() ? "" : "tensor " + in_quotes(tensor) + ": ", reason, store::older_ones(path)));
}

void Checkpoint::Impl::refuse(const std::string& file, int error) const {
  if (error == -1) damaged(file, "", "is not a regular file");
  if (error == ENOENT || error == ENOTDIR) damaged(file, "", errno_text(error));
  throw Error(fmt::format("checkpoint: {}/{}: cannot be read: {}", path, file, errno_text(error)));
}

std::string Checkpoint::Impl::manifest_text(bool or_none) const {
  FileRecord file;
  file.name = store::kManifestName;
  const auto status = look_at("checkpoint", path);
  if (!status && or_none) return "";
  if (!status) refuse("", ENOENT);
  if (!S_ISDIR(status->st_mode)) damaged("", "", "is not a folder");
  if (const int error = size_of_file(path + "/" + file.name, file.bytes)) {
    if (or_none && error == ENOENT) return "";
    refuse(file.name, error);
  }
  return read_text(file, file.bytes);
}

void Checkpoint::Impl::parse_manifest(const std::string& text) {
  FileRecord file;
  file.name = store::kManifestName;
  if (const int version = store::newer_version(text)) {
    throw CheckpointVersionError(
        fmt::format("checkpoint: {}/{}: its version is {}; this Tessera reads up to version {}: "
                    "expected a newer Tessera, or, if none has written it, the file has changed{}",
                    path, file.name, version, store::kManifestVersion, store::older_ones(path)));
  }
  try {
    manifest = store::manifest_from_text(text);
  } catch (const UsageError& error) {
    damaged(file.name, "", error.what());
  }
  const auto named = store::step_of_name(fs::path(path).filename().string());
  if (named && *named != manifest.step) {
    damaged(file.name, "",
            fmt::format("it is the manifest of step {}, in the folder of step {}", manifest.step,
                        *named));
  }
}

bool Checkpoint::Impl::check_file(const FileRecord& file, bool or_none) const {
  uint64_t size = 0;
  const int error = size_of_file(path + "/" + file.name, size);
  if (error == ENOENT && or_none) return false;
  if (error == ENOENT) damaged(file.name, "", "the file is missing" + writer_text(file));
  if (error != 0) refuse(file.name, error);
  if (size != file.bytes) {
    damaged(file.name, "",
            fmt::format("the file has {} bytes; the manifest has {}: it is {}", size, file.bytes,
                        size < file.bytes ? "cut short" : "damaged"));
  }
  return true;
}

void Checkpoint::Impl::index_slices() {
  for (const FileRecord& file : manifest.files) {
    records.emplace(file.name, &file);
    for (const auto& slice : file.slices) {
      for (const auto* names : {&slice.following, &slice.whole}) {
        for (const auto& name : *names) {
          if (file.tensors.count(slice.tensor_name(name)) == 0) {
            damaged(store::kManifestName, "",
                    "it lists no digest for " + in_quotes(slice.tensor_name(name)) + " of " +
                        file.name);
          }
        }
      }
      slices[file.slice_set][slice.parameter].push_back({&file, &slice});
    }
  }
}

const FileRecord& Checkpoint::Impl::record(const std::string& file) const {
  const auto found = records.find(file);
  if (found != records.end()) return *found->second;
  std::vector<std::string> names;
  for (const auto& each : records) names.push_back(each.first);
  throw UsageError(fmt::format("checkpoint: {} has no file {}{}", path, in_quotes(file),
                               did_you_mean(file, names)));
}

const FileRecord& Checkpoint::Impl::tensor_record(const std::string& file) const {
  const auto& found = record(file);
  if (!found.has_tensors())
    throw UsageError(
        fmt::format("checkpoint: {}/{} is a text file, not a safetensors file", path, file));
  return found;
}

FileDescriptor Checkpoint::Impl::open(const FileRecord& file) const {
  FileDescriptor opened_file = open_to_read(path + "/" + file.name);
  if (!opened_file) refuse(file.name, errno);
  return opened_file;
}

bool Checkpoint::Impl::here(const FileRecord& file) const {
  return source->here(number_of(manifest, file));
}

int64_t Checkpoint::Impl::read(const FileRecord& file, void* to, size_t count,
                               uint64_t offset) const {
  if (here(file)) return open(file).read_at(to, count, offset);
  try {
    source->read(number_of(manifest, file), to, count, offset);
  } catch (const BrokenWorldError&) {
    throw;
  } catch (const Error& error) {
    throw UsageError(fmt::format("checkpoint: {}/{}: {}", path, file.name, error.what()));
  }
  return static_cast<int64_t>(count);
}

std::string Checkpoint::Impl::read_text(const FileRecord& file, uint64_t bytes) const {
  std::string text(bytes, '\0');
  const int64_t got = read(file, text.data(), text.size(), 0);
  if (got < 0) refuse(file.name, errno);
  text.resize(static_cast<size_t>(got));
  return text;
}

void Checkpoint::Impl::check_header(const FileRecord& file) const {
  if (store::digest_of(read_text(file, file.header_bytes)) != file.digest)
    damaged(file.name, "",
            "its header does not match its digest in the manifest: the file is damaged");
}

const SafetensorsFile& Checkpoint::Impl::tensors(const std::string& file) const {
  auto& slot = opened[file];
  if (!slot) {
    const auto& expected = tensor_record(file);
    check_header(expected);
    const std::string name = path + "/" + file;
    auto parsed = here(expected) ? std::make_unique<SafetensorsFile>(name)
                                 : std::make_unique<SafetensorsFile>(
                                       name, expected.bytes,
                                       [this, &expected](void* to, size_t count, uint64_t offset) {
                                         return read(expected, to, count, offset);
                                       });
    if (parsed->entries().size() != expected.tensors.size()) {
      damaged(file, "",
              fmt::format("it has {} tensors; the manifest has {}", parsed->entries().size(),
                          expected.tensors.size()));
    }
    slot = std::move(parsed);
  }
  return *slot;
}

void Checkpoint::Impl::compare(const std::string& file, const std::string& tensor,
                               const at::Tensor& data) const {
  const FileRecord& of_file = tensor_record(file);
  const auto expected = of_file.tensors.find(tensor);
  if (expected == of_file.tensors.end())
    damaged(file, tensor, "the manifest lists no digest for it");
  if (store::digest_of(data.numel() > 0 ? data.data_ptr() : nullptr, data.nbytes()) !=
      expected->second)
    damaged_data(of_file, tensor);
}

void Checkpoint::Impl::damaged_data(const FileRecord& file, const std::string& tensor) const {
  const auto& entry = tensors(file.name).info(tensor);
  damaged(file.name, tensor,
          fmt::format("its data, bytes {} to {} of the file, does not match its digest in the "
                      "manifest: the file is damaged",
                      file.header_bytes + entry.begin, file.header_bytes + entry.end - 1));
}

void Checkpoint::Impl::verify_tensor(const FileRecord& file, const std::string& name,
                                     const std::string& digest) const {
  const auto& entry = tensors(file.name).info(name);
  const FileDescriptor opened_file = open(file);
  std::string found;
  try {
    found = store::digest_of(opened_file, file.header_bytes + entry.begin, entry.end - entry.begin);
  } catch (const UsageError& error) {  // it ends too early
    damaged(file.name, name, error.what());
  } catch (const Error& error) {
    throw Error(fmt::format("checkpoint: {}/{}: {}", path, file.name, error.what()));
  }
  if (found != digest) damaged_data(file, name);
}

std::string Checkpoint::Impl::text(const std::string& file) const {
  const auto& expected = record(file);
  if (expected.has_tensors())
    throw UsageError(
        fmt::format("checkpoint: {}/{} is a safetensors file, not a text file", path, file));
  const std::string contents = read_text(expected, expected.bytes);
  if (store::digest_of(contents) != expected.digest)
    damaged(file, "", "it does not match its digest in the manifest: the file is damaged");
  return contents;
}

/// The tensors and texts of a file are assigned in turn to the ranks that have it. Each of them
/// checks its header.
void Checkpoint::Impl::verify_share(int rank, int ranks) const {
  int turn = 0;
  for (const FileRecord& file : manifest.files) {
    if (!here(file)) continue;
    const auto place = source->place(number_of(manifest, file), rank, ranks);
    const auto mine = [&] { return turn++ % place.count == place.number; };
    if (!file.has_tensors()) {
      if (mine()) text(file.name);
      continue;
    }
    tensors(file.name);
    for (const auto& [name, digest] : file.tensors)
      if (mine()) verify_tensor(file, name, digest);
  }
}

at::Tensor Checkpoint::Impl::load(const std::string& file, const std::string& name) const {
  const at::Tensor tensor = tensors(file).load(name);
  compare(file, name, tensor);
  return tensor;
}

void Checkpoint::Impl::load_slice(const std::string& file, const std::string& name, int64_t begin,
                                  int64_t count, at::Tensor out) const {
  const auto& all = tensors(file);
  all.load_slice(name, begin, count, out);
  if (begin == 0 && count == all.info(name).numel()) compare(file, name, out);
}

at::ScalarType Checkpoint::Impl::dtype(const std::string& file, const std::string& name) const {
  return tensors(file).scalar_type(name);
}

}  // namespace tessera
