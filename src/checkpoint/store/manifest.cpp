#include "checkpoint/store/manifest.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "checkpoint/io/digest.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/io/value_json.h"
#include "tessera/error.h"

namespace tessera::store {
namespace {

using nlohmann::json;

constexpr const char* kFormat = "tessera-checkpoint";
constexpr std::string_view kTrailerBegin = ",\n \"digest\": \"";
constexpr std::string_view kTrailerEnd = "\"\n}\n";

json to_json(const SliceRecord& slice) {
  json value = {{"parameter", slice.parameter},
                {"shape", slice.shape},
                {"begin", slice.begin},
                {"numel", slice.numel}};
  if (slice.strides.size() > 1) value["strides"] = slice.strides;
  if (!slice.following.empty()) value["following"] = slice.following;
  if (!slice.whole.empty()) value["whole"] = slice.whole;
  for (const auto& [name, scalar] : slice.scalars) value["scalars"][name] = json_of(scalar);
  return value;
}

SliceRecord slice_from_json(const json& value) {
  SliceRecord slice{{value.at("parameter"), value.at("shape"), value.at("begin"), value.at("numel"),
                     value.value("strides", std::vector<int64_t>())},
                    value.value("following", std::vector<std::string>()),
                    value.value("whole", std::vector<std::string>()),
                    {}};
  if (value.contains("scalars"))
    for (const auto& item : value.at("scalars").items())
      slice.scalars[item.key()] = scalar_from_json(item.value());
  check_range(slice);
  return slice;
}

json to_json(const FileRecord& file) {
  json value = {{"rank", file.rank}, {"bytes", file.bytes}};
  if (!file.host.empty()) value["host"] = file.host;
  if (!file.has_tensors()) {
    value["digest"] = file.digest;
    return value;
  }
  value["header_bytes"] = file.header_bytes;
  value["header_digest"] = file.digest;
  value["tensors"] = file.tensors;
  if (!file.nonfinite.empty()) value["nonfinite"] = file.nonfinite;
  if (!file.slices.empty()) value["slice_set"] = file.slice_set;
  for (const auto& slice : file.slices) value["slices"].push_back(to_json(slice));
  return value;
}

FileRecord file_from_json(const std::string& name, const json& value) {
  check_file_name(name);
  FileRecord file;
  file.name = name;
  file.rank = value.at("rank");
  file.bytes = value.at("bytes");
  file.host = value.value("host", file.host);
  if (!value.contains("tensors")) {
    file.digest = value.at("digest");
    return file;
  }
  file.header_bytes = value.at("header_bytes");
  file.digest = value.at("header_digest");
  file.tensors = value.at("tensors").get<std::map<std::string, std::string>>();
  file.nonfinite = value.value("nonfinite", file.nonfinite);
  if (file.header_bytes == 0 || file.header_bytes > file.bytes) {
    throw UsageError(
        fmt::format("{}: header_bytes is {} of {}", name, file.header_bytes, file.bytes));
  }
  if (value.contains("slices")) {
    file.slice_set = value.at("slice_set");
    for (const auto& slice : value.at("slices")) file.slices.push_back(slice_from_json(slice));
  }
  return file;
}

std::string dumped(const json& value, int indent) {
  try {
    return value.dump(indent);
  } catch (const json::exception&) {
    throw UsageError("checkpoint: a name of a file, a parameter or its state is not valid UTF-8");
  }
}

Manifest parse_body(const std::string& body) {
  const json value = json::parse(body + "\n}");
  if (const std::string format = value.at("format"); format != kFormat)
    throw UsageError("its format is " + safetensors::in_quotes(format) + ", expected " + kFormat);
  if (const int version = value.at("version"); version != kManifestVersion) {
    throw UsageError(
        fmt::format("its version is {}; this Tessera reads version {}", version, kManifestVersion));
  }
  Manifest manifest{value.at("step"), value.at("world_size"), {}, value.value("save_id", "")};
  for (const auto& item : value.at("files").items())
    manifest.files.push_back(file_from_json(item.key(), item.value()));
  return manifest;
}

}  // namespace

std::string SliceRecord::tensor_name(const std::string& state) const {
  const bool all = begin == 0 && numel == count_elements(shape);
  return parameter + (all ? "" : fmt::format("[{}:{}]", begin, begin + numel)) + "/" + state;
}

std::string writer_text(const FileRecord& file) {
  return file.host.empty() ? fmt::format(" (rank {} wrote it)", file.rank)
                           : fmt::format(" (rank {} on host {} wrote it)", file.rank, file.host);
}

std::string unsound_text(const std::vector<FileRecord>& files) {
  std::string text;
  for (const auto& file : files)
    for (const auto& tensor : file.nonfinite) text += file.name + ": " + tensor + "\n";
  return text;
}

int64_t count_elements(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(product, size, &product)) {
      throw UsageError(fmt::format("the shape [{}] has sizes that are negative or overflow",
                                   fmt::join(shape, ", ")));
    }
  }
  return product;
}

namespace {

/// True if a tensor of these sizes and strides has its elements side by side, in some order.
bool are_dense(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  if (shape.size() != strides.size()) return false;
  std::vector<std::pair<int64_t, int64_t>> by_stride;
  for (size_t i = 0; i < shape.size(); ++i)
    if (shape[i] != 1) by_stride.emplace_back(strides[i], shape[i]);
  std::sort(by_stride.begin(), by_stride.end());
  int64_t expected = 1;
  return std::all_of(by_stride.begin(), by_stride.end(), [&](const auto& dimension) {
    return dimension.first == std::exchange(expected, expected * dimension.second);
  });
}

}  // namespace

void check_range(const ElementRange& range) {
  const int64_t all = count_elements(range.shape);
  if (range.begin < 0 || range.numel < 0 || range.begin > all || range.numel > all - range.begin) {
    throw UsageError(fmt::format("elements [{}, +{}) are not within the {} of shape [{}]",
                                 range.begin, range.numel, all, fmt::join(range.shape, ", ")));
  }
  if (range.strides.empty() || all == 0 || are_dense(range.shape, range.strides)) return;
  throw UsageError(
      fmt::format("strides [{}] do not fit shape [{}]; expected those of a dense tensor",
                  fmt::join(range.strides, ", "), fmt::join(range.shape, ", ")));
}

void check_file_name(const std::string& name) {
  if (name.empty() || name.size() > 200 || name[0] == '.' || name.rfind("manifest.", 0) == 0 ||
      name.find_first_of(std::string("/\\\0", 3)) != std::string::npos) {
    throw UsageError(
        "checkpoint: the file name " + safetensors::in_quotes(name) +
        " is not allowed; expected a plain name of at most 200 bytes that does not begin "
        "with '.' or \"manifest.\"");
  }
}

std::string records_to_text(const std::vector<FileRecord>& records) {
  json list = json::array();
  for (const auto& record : records) list.push_back({record.name, to_json(record)});
  return dumped(list, -1);
}

std::vector<FileRecord> records_from_text(const std::string& text) {
  std::vector<FileRecord> records;
  for (const auto& item : json::parse(text))
    records.push_back(file_from_json(item.at(0), item.at(1)));
  return records;
}

std::string manifest_to_text(const Manifest& manifest) {
  json value = {{"format", kFormat},
                {"version", kManifestVersion},
                {"digest_algorithm", kDigestAlgorithm},
                {"step", manifest.step},
                {"world_size", manifest.world_size},
                {"files", json::object()}};
  if (!manifest.save_id.empty()) value["save_id"] = manifest.save_id;
  for (const auto& file : manifest.files) value["files"][file.name] = to_json(file);
  std::string body = dumped(value, 1);
  body.resize(body.size() - std::strlen("\n}"));
  return body + std::string(kTrailerBegin) + digest_of(body) + std::string(kTrailerEnd);
}

int newer_version(std::string_view text) {
  const json value = json::parse(text, nullptr, false);
  if (!value.is_object() || value.value("format", json()) != kFormat) return 0;
  const json version = value.value("version", json());
  return version.is_number_integer() && version > kManifestVersion ? version.get<int>() : 0;
}

Manifest manifest_from_text(std::string_view text) {
  const size_t trailer = kTrailerBegin.size() + kDigestLength + kTrailerEnd.size();
  if (text.size() < trailer)
    throw UsageError(
        fmt::format("it has {} bytes, too few for a manifest: it is cut short", text.size()));
  const std::string_view end = text.substr(text.size() - trailer);
  const std::string body(text.substr(0, text.size() - trailer));
  if (end.substr(0, kTrailerBegin.size()) != kTrailerBegin ||
      end.substr(trailer - kTrailerEnd.size()) != kTrailerEnd)
    throw UsageError("it does not end with its digest: it is cut short or damaged");
  if (end.substr(kTrailerBegin.size(), kDigestLength) != digest_of(body))
    throw UsageError("its digest does not match its contents: it is damaged");
  try {
    return parse_body(body);
  } catch (const json::exception& error) {
    throw UsageError(std::string("it violates the format: ") + error.what());
  }
}

}  // namespace tessera::store
