#include "tessera/safetensors_weights.h"

#include <cerrno>
#include <filesystem>
#include <unordered_map>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>

#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {

namespace fs = std::filesystem;

struct SafetensorsWeights::Impl {
  explicit Impl(const std::string& given);
  void open_index();
  const SafetensorsFile& file_of(const std::string& name) const;

  std::string path;
  std::vector<std::unique_ptr<SafetensorsFile>> files;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, const SafetensorsFile*> by_name;
};

namespace {

std::string weights_in(const std::string& path) {
  std::error_code ignored;
  if (!fs::is_directory(path, ignored)) return path;
  for (const char* name : {kWeightsIndexName, "model.safetensors", "weights.safetensors"}) {
    if (fs::exists(fs::path(path) / name, ignored)) return (fs::path(path) / name).string();
  }
  throw UsageError(
      fmt::format("safetensors: {}: the folder has no weights; expected {}, model.safetensors or "
                  "weights.safetensors in it",
                  path, kWeightsIndexName));
}

bool is_index(const std::string& path) { return path.ends_with(kWeightsIndexSuffix); }

std::string text_of(const std::string& path) {
  const auto refuse = [&](const std::string& reason) {
    throw UsageError("safetensors: " + path + ": " + reason);
  };
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0) refuse("cannot be opened: " + errno_text(errno));
  if (!S_ISREG(status.st_mode)) refuse("is not a regular file");
  if (static_cast<uint64_t>(status.st_size) > safetensors::kMaxHeaderBytes)
    refuse(fmt::format("has {} bytes; expected an index of at most {}", status.st_size,
                       safetensors::kMaxHeaderBytes));
  std::string text(static_cast<size_t>(status.st_size), '\0');
  const int64_t got = file.read_at(text.data(), text.size(), 0);
  if (got < 0) throw Error("safetensors: " + path + ": reading failed: " + errno_text(errno));
  text.resize(static_cast<size_t>(got));
  return text;
}

}  // namespace

SafetensorsWeights::Impl::Impl(const std::string& given) : path(weights_in(given)) {
  if (is_index(path)) open_index();
  else files.push_back(std::make_unique<SafetensorsFile>(path));
  for (const auto& file : files) {
    for (const auto& entry : file->entries()) {
      entries.push_back(entry);
      by_name.emplace(entry.name, file.get());
    }
  }
}

void SafetensorsWeights::Impl::open_index() {
  const WeightsIndex index = parse_weights_index(path, text_of(path));
  std::map<std::string, const std::vector<SafetensorsEntry>*> contents;
  for (const auto& name : index.file_names()) {
    const fs::path file = fs::path(path).parent_path() / name;
    try {
      files.push_back(std::make_unique<SafetensorsFile>(file.string()));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}; {} lists it", error.what(), path));
    }
    contents.emplace(name, &files.back()->entries());
  }
  index.check(path, contents);
}

const SafetensorsFile& SafetensorsWeights::Impl::file_of(const std::string& name) const {
  const auto found = by_name.find(name);
  if (found != by_name.end()) return *found->second;
  std::vector<std::string> names;
  for (const auto& entry : entries) names.push_back(entry.name);
  throw UsageError("safetensors: " + path + ": no tensor " + safetensors::in_quotes(name) +
                   did_you_mean(name, names));
}

SafetensorsWeights::SafetensorsWeights(const std::string& path)
    : impl_(std::make_unique<Impl>(path)) {}
SafetensorsWeights::~SafetensorsWeights() = default;
SafetensorsWeights::SafetensorsWeights(SafetensorsWeights&&) noexcept = default;
SafetensorsWeights& SafetensorsWeights::operator=(SafetensorsWeights&&) noexcept = default;

const std::string& SafetensorsWeights::path() const { return impl_->path; }
const std::vector<SafetensorsEntry>& SafetensorsWeights::entries() const { return impl_->entries; }
bool SafetensorsWeights::contains(const std::string& name) const {
  return impl_->by_name.count(name) > 0;
}
const SafetensorsEntry& SafetensorsWeights::info(const std::string& name) const {
  return impl_->file_of(name).info(name);
}
at::ScalarType SafetensorsWeights::scalar_type(const std::string& name) const {
  return impl_->file_of(name).scalar_type(name);
}
at::Tensor SafetensorsWeights::load(const std::string& name) const {
  return impl_->file_of(name).load(name);
}
void SafetensorsWeights::load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                                    at::Tensor out) const {
  impl_->file_of(name).load_slice(name, elem_begin, elem_count, std::move(out));
}

}  // namespace tessera
