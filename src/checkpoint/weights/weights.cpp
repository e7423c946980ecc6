#include "tessera/weights/weights.h"

#include <cerrno>
#include <filesystem>
#include <map>
#include <unordered_map>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/file_kind.h"
#include "checkpoint/weights/key_map.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/safetensors_weights.h"
#include "tessera/weights/torch_file.h"

namespace tessera {

namespace fs = std::filesystem;

struct Weights::Impl {
  struct Place {
    const TensorSource* file;
    std::string name;  // in the file
    size_t entry;      // of `entries`
  };

  Impl(const std::string& given, const WeightsOptions& chosen);
  void open_index();
  void add_names(const KeyMap& rename);
  const Place& place_of(const std::string& name) const;

  std::string path;
  WeightsOptions options;
  std::vector<std::unique_ptr<TensorSource>> files;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, Place> by_name;
};

namespace {

constexpr int64_t kMaxIndexBytes = 32 << 20;  // 200,000 tensors with names of 100 bytes

std::string weights_in(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  const auto has = [&](const char* name) { return fs::exists(fs::path(path) / name, ignored); };
  if (has(kWeightsIndexName) && has("model.safetensors"))
    throw UsageError(
        fmt::format("weights: {}: the folder has {} and model.safetensors, of which Hugging Face's "
                    "libraries read the second; expected one of them, or the path of a file",
                    path, kWeightsIndexName));
  for (const char* name : {kWeightsIndexName, "model.safetensors", "weights.safetensors",
                           "pytorch_model.bin.index.json", "pytorch_model.bin"}) {
    if (has(name)) return (fs::path(path) / name).string();
  }
  throw UsageError(
      fmt::format("weights: {}: the folder has no weights; expected {}, model.safetensors, "
                  "weights.safetensors or pytorch_model.bin in it",
                  path, kWeightsIndexName));
}

/// Reads the first bytes of a file. Throws UsageError unless it is a regular file.
std::string beginning_of(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0)
    throw UsageError("weights: " + path + ": cannot be opened: " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) throw UsageError("weights: " + path + ": is not a regular file");
  std::string text(kKindBytes, '\0');
  const int64_t got = file.read_at(text.data(), text.size(), 0);
  if (got < 0) throw Error("weights: " + path + ": reading failed: " + errno_text(errno));
  text.resize(static_cast<size_t>(got));
  return text;
}

bool is_index(const std::string& path) {
  return path.ends_with(kWeightsIndexSuffix) || file_kind(beginning_of(path)) == FileKind::json;
}

std::unique_ptr<TensorSource> open_file(const std::string& path, const std::string& key) {
  const std::string begin = beginning_of(path);
  const FileKind kind = file_kind(begin);
  if (kind == FileKind::foreign) throw UsageError("weights: " + path + ": " + foreign_kind(begin));
  if (kind == FileKind::zip) return std::make_unique<TorchFile>(path, key);
  if (!key.empty())
    throw UsageError("weights: " + path +
                     ": is a safetensors file, which has no dicts; expected "
                     "no key, given is " +
                     safetensors::in_quotes(key));
  return std::make_unique<SafetensorsFile>(path);
}

std::string text_of(const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError("weights: " + path + ": " + reason);
  };
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) refuse("cannot be opened: " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
  if (status.st_size > kMaxIndexBytes)
    refuse(fmt::format("has {} bytes; expected an index of at most {}", status.st_size,
                       kMaxIndexBytes));
  std::string text(static_cast<size_t>(status.st_size), '\0');
  const int64_t got = file.read_at(text.data(), text.size(), 0);
  if (got < 0) throw Error("weights: " + path + ": reading failed: " + errno_text(errno));
  text.resize(static_cast<size_t>(got));
  return text;
}

}  // namespace

Weights::Impl::Impl(const std::string& given, const WeightsOptions& chosen)
    : path(weights_in(given)), options(chosen) {
  const KeyMap rename(options.key_map);
  if (is_index(path)) open_index();
  else files.push_back(open_file(path, options.key));
  add_names(rename);
}

void Weights::Impl::add_names(const KeyMap& rename) {
  for (const auto& file : files) {
    for (const auto& entry : file->entries()) {
      entries.push_back(entry);
      entries.back().name = rename(entry.name);
      const auto [at, added] =
          by_name.emplace(entries.back().name, Place{file.get(), entry.name, entries.size() - 1});
      if (!added)
        throw UsageError(fmt::format("weights: {}: key_map gives {} and {} the same name {}", path,
                                     safetensors::in_quotes(at->second.name),
                                     safetensors::in_quotes(entry.name),
                                     safetensors::in_quotes(entries.back().name)));
    }
  }
}

void Weights::Impl::open_index() {
  const WeightsIndex index = parse_weights_index(path, text_of(path));
  std::map<std::string, const std::vector<SafetensorsEntry>*> contents;
  for (const auto& name : index.file_names()) {
    const fs::path file = fs::path(path).parent_path() / name;
    try {
      files.push_back(open_file(file.string(), options.key));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}; {} lists it", error.what(), path));
    }
    contents.emplace(name, &files.back()->entries());
  }
  index.check(path, contents);
}

const Weights::Impl::Place& Weights::Impl::place_of(const std::string& name) const {
  const auto found = by_name.find(name);
  if (found != by_name.end()) return found->second;
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  throw UsageError("weights: " + path + ": no tensor " + safetensors::in_quotes(name) +
                   did_you_mean(name, names));
}

Weights::Weights(const std::string& path, const WeightsOptions& options)
    : impl_(std::make_shared<const Impl>(path, options)) {}

const std::string& Weights::path() const { return impl_->path; }
const std::vector<SafetensorsEntry>& Weights::entries() const { return impl_->entries; }
bool Weights::contains(const std::string& name) const { return impl_->by_name.count(name) > 0; }
const SafetensorsEntry& Weights::info(const std::string& name) const {
  return impl_->entries[impl_->place_of(name).entry];
}
at::ScalarType Weights::scalar_type(const std::string& name) const {
  const auto& place = impl_->place_of(name);
  return place.file->scalar_type(place.name);
}
at::Tensor Weights::load(const std::string& name) const {
  const auto& place = impl_->place_of(name);
  return place.file->load(place.name);
}
at::Tensor Weights::load_bytes(const std::string& name) const {
  const auto& place = impl_->place_of(name);
  return place.file->load_bytes(place.name);
}
void Weights::load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                         at::Tensor out) const {
  const auto& place = impl_->place_of(name);
  place.file->load_slice(place.name, elem_begin, elem_count, std::move(out));
}

void Weights::load_into(const std::string& name, at::Tensor into) const {
  at::NoGradGuard no_grad;
  const bool in_place =
      into.is_contiguous() && into.device().is_cpu() && into.scalar_type() == scalar_type(name);
  if (in_place) load_slice(name, 0, into.numel(), into.view({-1}));
  else into.copy_(load(name));
}

}  // namespace tessera
