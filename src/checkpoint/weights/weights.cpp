#include "tessera/weights/weights.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <regex>
#include <unordered_map>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/file_kind.h"
#include "checkpoint/weights/links.h"
#include "tessera/detail/nearest.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/safetensors_weights.h"
#include "tessera/weights/torch_file.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

/// The rules of WeightsOptions::key_map, compiled.
class KeyMap {
 public:
  /// Throws UsageError with the pattern if one is no regular expression.
  explicit KeyMap(const std::vector<NameRule>& rules);
  std::string operator()(std::string name) const;

 private:
  std::vector<std::pair<std::regex, std::string>> rules_;
};

KeyMap::KeyMap(const std::vector<NameRule>& rules) {
  for (const auto& rule : rules) {
    try {
      rules_.emplace_back(std::regex(rule.pattern), rule.replacement);
    } catch (const std::regex_error& error) {
      throw UsageError("key_map: pattern " + safetensors::in_quotes(rule.pattern) +
                       " is no regular expression: " + error.what());
    }
  }
}

std::string KeyMap::operator()(std::string name) const {
  // The matcher of the C++ library recurses for each character.
  constexpr size_t kMaxName = 4096;
  if (!rules_.empty() && name.size() > kMaxName)
    throw UsageError("key_map: the name " + safetensors::in_quotes(name) + " has " +
                     std::to_string(name.size()) + " bytes; expected at most 4096");
  for (const auto& [pattern, replacement] : rules_)
    name = std::regex_replace(name, pattern, replacement);
  return name;
}

}  // namespace

void check_key_map(const std::vector<NameRule>& rules) { KeyMap{rules}; }

struct Weights::Impl {
  struct Place {
    const TensorSource* file;
    std::string name;  // in the file
    size_t entry;      // of `entries`
  };

  Impl(const std::string& given, const WeightsOptions& chosen);
  void open_index(const KeyMap& rename);
  void add(const TensorSource& file, const SafetensorsEntry& entry, const KeyMap& rename);
  const Place& place_of(const std::string& name) const;

  std::string path;
  WeightsOptions options;
  std::vector<std::unique_ptr<TensorSource>> files;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, Place> by_name;
};

namespace {

constexpr uint64_t kMaxIndexBytes = 32 << 20;  // 200,000 tensors with names of 100 bytes

/// For files that a folder or an index names, not the user.
void warn_of_link(const fs::path& file) {
  if (const auto target = link_outside(file); !target.empty())
    spdlog::warn("tessera: weights: {} is a link to {}, outside of its folder", file.string(),
                 target.string());
}

std::string weights_in(const std::string& path) {
  const auto given = look_at("weights", path);
  if (!given || !S_ISDIR(given->st_mode)) return path;
  // Hugging Face's libraries prefer a single file to an index, and safetensors to torch.save.
  for (const char* name : {"model.safetensors", kWeightsIndexName, "weights.safetensors",
                           "pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    const std::string chosen = (fs::path(path) / name).string();
    if (!look_at("weights", chosen)) continue;
    warn_of_link(chosen);
    if (const std::string index = chosen + ".index.json"; look_at("weights", index))
      spdlog::warn("tessera: weights: {} is read, as by Hugging Face's libraries; {} is there, too",
                   chosen, index);
    return chosen;
  }
  throw UsageError(
      fmt::format("weights: {}: the folder has no weights; expected {}, model.safetensors, "
                  "weights.safetensors or pytorch_model.bin in it",
                  path, kWeightsIndexName));
}

std::string index_text(const std::string& path) {
  std::string text = read_file("weights", path, kMaxIndexBytes + 1);
  if (text.size() > kMaxIndexBytes)
    throw UsageError(
        fmt::format("weights: {}: expected an index of at most {} bytes", path, kMaxIndexBytes));
  return text;
}

bool is_index(const std::string& path) {
  return path.ends_with(kWeightsIndexSuffix) ||
         file_kind(read_file("weights", path, kKindBytes)) == FileKind::json;
}

std::unique_ptr<TensorSource> open_file(const std::string& path, const std::string& key) {
  const std::string begin = read_file("weights", path, kKindBytes);
  const FileKind kind = file_kind(begin);
  if (kind == FileKind::foreign) throw UsageError("weights: " + path + ": " + foreign_kind(begin));
  if (kind == FileKind::zip || kind == FileKind::legacy)
    return std::make_unique<TorchFile>(path, key);
  if (!key.empty())
    throw UsageError("weights: " + path +
                     ": is a safetensors file, which has no dicts; expected "
                     "no key, given is " +
                     safetensors::in_quotes(key));
  return std::make_unique<SafetensorsFile>(path);
}

}  // namespace

Weights::Impl::Impl(const std::string& given, const WeightsOptions& chosen)
    : path(weights_in(given)), options(chosen) {
  const KeyMap rename(options.key_map);
  if (is_index(path)) {
    open_index(rename);
  } else {
    files.push_back(open_file(path, options.key));
    for (const auto& entry : files[0]->entries()) add(*files[0], entry, rename);
  }
}

void Weights::Impl::add(const TensorSource& file, const SafetensorsEntry& entry,
                        const KeyMap& rename) {
  const std::string name = rename(entry.name);
  const auto [at, added] = by_name.emplace(name, Place{&file, entry.name, entries.size()});
  if (!added && at->second.name == entry.name) return;  // in two files, and in no index
  if (!added)
    throw UsageError(fmt::format("weights: {}: key_map gives {} and {} the same name {}", path,
                                 safetensors::in_quotes(at->second.name),
                                 safetensors::in_quotes(entry.name), safetensors::in_quotes(name)));
  entries.push_back(entry);
  entries.back().name = name;
}

void Weights::Impl::open_index(const KeyMap& rename) {
  const WeightsIndex index = parse_weights_index(path, index_text(path));
  std::map<std::string, const std::vector<SafetensorsEntry>*> contents;
  const auto names = index.file_names();
  for (const auto& name : names) {
    const fs::path file = fs::path(path).parent_path() / name;
    warn_of_link(file);
    try {
      files.push_back(open_file(file.string(), options.key));
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}; {} lists it", error.what(), path));
    }
    contents.emplace(name, &files.back()->entries());
  }
  const auto notes = index.check(path, contents);
  if (!notes.empty())
    spdlog::warn("tessera: weights: {}{}", notes[0],
                 notes.size() == 1 ? "" : fmt::format("; {} more like it", notes.size() - 1));
  for (size_t i = 0; i < files.size(); ++i) {
    for (const auto& entry : files[i]->entries()) {
      const auto listed = index.files.find(entry.name);
      if (listed == index.files.end() || listed->second == names[i]) add(*files[i], entry, rename);
    }
  }
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
