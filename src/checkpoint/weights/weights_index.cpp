#include <algorithm>
#include <numeric>
#include <set>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"
#include "tessera/safetensors_weights.h"

namespace tessera {

using nlohmann::json;
using safetensors::in_quotes;

namespace {

constexpr const char* kWeightMap = "weight_map";
constexpr const char* kTotalSize = "total_size";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kTorchSuffix = ".bin";

[[noreturn]] void refuse_index(const std::string& path, const std::string& reason) {
  throw UsageError("weights: " + path + ": " + reason);
}

/// Parses the text. Refuses repeated keys of an object; the parser would drop values.
json parse_once(const std::string& path, const std::string& text) {
  std::vector<std::set<std::string>> keys;
  const auto look = [&](int /*depth*/, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key && !keys.back().insert(value.get<std::string>()).second)
      refuse_index(path, "the key " + in_quotes(value.get<std::string>()) + " is given twice");
    return true;
  };
  try {
    return json::parse(text, look);
  } catch (const json::exception& error) {
    refuse_index(path, std::string("is not JSON: ") + error.what());
  }
}

void check_part_name(const std::string& path, const std::string& tensor, const std::string& file) {
  const bool ends = file.ends_with(kFileSuffix) || file.ends_with(kTorchSuffix);
  if (ends && file[0] != '.' && file.find_first_of(std::string("/\\\0", 3)) == file.npos) return;
  refuse_index(
      path, fmt::format("{} gives tensor {} the file {}; expected the plain name of a "
                        "{} or {} file in the index's folder",
                        kWeightMap, in_quotes(tensor), in_quotes(file), kFileSuffix, kTorchSuffix));
}

/// Other libraries do not read it, so any value is allowed.
std::optional<uint64_t> total_of(const json& value) {
  const auto metadata = value.find("metadata");
  if (metadata == value.end() || !metadata->is_object() || !metadata->contains(kTotalSize))
    return std::nullopt;
  const json& total = metadata->at(kTotalSize);
  // Some writers divide bits by 8 and store a whole number with a decimal point.
  constexpr double kMost = 9e15;
  if (total.is_number_unsigned()) return total.get<uint64_t>();
  if (total.is_number_float() && total.get<double>() >= 0 && total.get<double>() < kMost)
    return total.get<uint64_t>();
  return std::nullopt;
}

uint64_t bytes_of(const SafetensorsSpec& spec) {
  return std::accumulate(
      spec.shape.begin(), spec.shape.end(), static_cast<uint64_t>(c10::elementSize(spec.dtype)),
      [](uint64_t product, int64_t size) { return product * static_cast<uint64_t>(size); });
}

/// Divides the part of each rank into files of at most `max_bytes`.
std::vector<WeightsPart> cut_parts(const std::vector<SafetensorsSpec>& tensors,
                                   std::vector<WeightsPart>& ranks, uint64_t max_bytes) {
  std::vector<WeightsPart> parts;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::sort(ranks[rank].tensors.begin(), ranks[rank].tensors.end());
    parts.push_back({static_cast<int>(rank)});
    for (const size_t i : ranks[rank].tensors) {
      const uint64_t bytes = bytes_of(tensors[i]);
      const bool full = bytes > max_bytes || parts.back().bytes > max_bytes - bytes;
      if (full && !parts.back().tensors.empty()) parts.push_back({static_cast<int>(rank)});
      parts.back().tensors.push_back(i);
      parts.back().bytes += bytes;
    }
  }
  return parts;
}

}  // namespace

std::vector<std::string> WeightsIndex::file_names() const {
  std::set<std::string> names;
  for (const auto& [tensor, file] : files) names.insert(file);
  return {names.begin(), names.end()};
}

std::vector<std::string> WeightsIndex::check(
    const std::string& path,
    const std::map<std::string, const std::vector<SafetensorsEntry>*>& entries) const {
  uint64_t total = 0;
  bool shares = false;  // a file of torch.save, whose tensors may share their elements
  std::set<std::string> found;
  std::vector<std::string> notes;
  for (const auto& [file, tensors] : entries) {
    shares |= file.ends_with(kTorchSuffix);
    for (const auto& entry : *tensors) {
      const auto listed = files.find(entry.name);
      total += entry.end - entry.begin;
      if (listed != files.end() && listed->second == file) found.insert(entry.name);
      else if (listed != files.end())
        notes.push_back(fmt::format("{} has tensor {}, which is read from {}", file,
                                    in_quotes(entry.name), listed->second));
      else
        notes.push_back(
            fmt::format("{} has tensor {}, which {} lacks", file, in_quotes(entry.name), path));
    }
  }
  for (const auto& [tensor, file] : files) {
    if (found.count(tensor) == 0)
      refuse_index(path, fmt::format("the index gives tensor {} to {}, which does not have it",
                                     in_quotes(tensor), file));
  }
  // Hugging Face's libraries count elements that tensors share once.
  if (total_size && *total_size != total && !(shares && *total_size < total))
    notes.push_back(fmt::format("{} of {} is {}; the tensors of its files have {} bytes",
                                kTotalSize, path, *total_size, total));
  return notes;
}

WeightsIndex parse_weights_index(const std::string& path, const std::string& text) {
  const json value = parse_once(path, text);
  if (!value.is_object() || !value.contains(kWeightMap) || !value.at(kWeightMap).is_object() ||
      value.at(kWeightMap).empty())
    refuse_index(path, fmt::format("has no {}; expected an index of files of weights", kWeightMap));
  WeightsIndex index;
  for (const auto& item : value.at(kWeightMap).items()) {
    if (!item.value().is_string())
      refuse_index(
          path, fmt::format("{} gives tensor {} no file name", kWeightMap, in_quotes(item.key())));
    const auto file = item.value().get<std::string>();
    check_part_name(path, item.key(), file);
    index.files.emplace(item.key(), file);
  }
  index.total_size = total_of(value);
  return index;
}

std::vector<WeightsPart> divide_weights(const std::vector<SafetensorsSpec>& tensors, int ranks,
                                        size_t rank0_from, uint64_t max_bytes) {
  const size_t count = std::clamp<size_t>(tensors.size(), 1, static_cast<size_t>(ranks));
  std::vector<WeightsPart> parts(count);
  std::vector<size_t> order(std::min(rank0_from, tensors.size()));
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return bytes_of(tensors[a]) > bytes_of(tensors[b]); });
  const auto give = [&](WeightsPart& part, size_t tensor) {
    part.tensors.push_back(tensor);
    part.bytes += bytes_of(tensors[tensor]);
  };
  for (size_t i = order.size(); i < tensors.size(); ++i) give(parts[0], i);
  // Every part gets a tensor: a part without one comes before others with as many bytes.
  const auto less = [](const WeightsPart& a, const WeightsPart& b) {
    return std::pair(a.bytes, a.tensors.size()) < std::pair(b.bytes, b.tensors.size());
  };
  for (const size_t i : order) give(*std::min_element(parts.begin(), parts.end(), less), i);
  while (parts.size() > 1 && parts.back().tensors.empty()) parts.pop_back();
  parts = cut_parts(tensors, parts, max_bytes);
  for (size_t i = 0; i < parts.size(); ++i)
    parts[i].file = fmt::format("model-{:05d}-of-{:05d}{}", i + 1, parts.size(), kFileSuffix);
  return parts;
}

std::string weights_index_text(const std::vector<SafetensorsSpec>& tensors,
                               const std::vector<WeightsPart>& parts) {
  uint64_t total = 0;
  json map = json::object();
  for (const auto& part : parts) {
    total += part.bytes;
    for (const size_t i : part.tensors) map[tensors[i].name] = part.file;
  }
  try {
    return json{{"metadata", {{kTotalSize, total}}}, {kWeightMap, std::move(map)}}.dump(2) + "\n";
  } catch (const json::exception&) {
    throw UsageError("weights: the name of a tensor is not valid UTF-8");
  }
}

}  // namespace tessera
