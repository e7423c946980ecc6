#include "tessera/weights/weights_tools.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <spdlog/spdlog.h>

#include "checkpoint/io/digest.h"
#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/weights/links.h"
#include "checkpoint/weights/part_writers.h"
#include "checkpoint/weights/weights_folder.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/safetensors_weights.h"
#include "tessera/step/nonfinite.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

std::vector<SafetensorsSpec> specs_of(const Weights& from, const ConvertOptions& options) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& entry : from.entries()) {
    at::ScalarType type = from.scalar_type(entry.name);
    if (options.dtype && at::isFloatingType(type)) type = *options.dtype;
    specs.push_back({entry.name, type, entry.shape});
  }
  return specs;
}

bool holds_weights(const fs::path& file) {
  const std::set<std::string> kEndings{".safetensors", ".bin",  ".pt",   ".pth", ".h5",
                                       ".msgpack",     ".gguf", ".onnx", ".ot"};
  return kEndings.count(file.extension().string()) > 0 ||
         file.string().ends_with(kWeightsIndexSuffix);
}

/// True if the index `from` names the file `to`.
bool is_part(const fs::path& from, const fs::path& to) {
  std::error_code ignored;
  if (!from.string().ends_with(kWeightsIndexSuffix)) return false;
  const auto names = parse_weights_index(from.string(), read_file("weights", from)).file_names();
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return fs::equivalent(from.parent_path() / name, to, ignored);
  });
}

/// UsageError if finite elements do not fit into the new dtype.
at::Tensor converted(const Weights& from, const SafetensorsSpec& spec) {
  const at::Tensor given = from.load(spec.name), result = given.to(spec.dtype);
  const std::string there = nonfinite_text(result);
  if (given.scalar_type() != spec.dtype && !there.empty() && there != nonfinite_text(given))
    throw UsageError(fmt::format(
        "weights: {}: tensor {} has values that do not fit into {}, which makes {}; expected "
        "bfloat16, which has the range of float32, or no other dtype",
        from.path(), safetensors::in_quotes(spec.name), c10::toString(spec.dtype), there));
  return result;
}

/// A file must not be read and replaced at the same time.
void check_distinct(const Weights& from, const std::string& to) {
  std::error_code ignored;
  const fs::path source = fs::path(from.path()).parent_path();
  const bool same = is_weights_folder(to)
                        ? fs::equivalent(source.empty() ? "." : source, to, ignored)
                        : fs::equivalent(from.path(), to, ignored) || is_part(from.path(), to);
  if (same)
    throw UsageError("weights: " + to + ": is where the weights are read from; expected another " +
                     (is_weights_folder(to) ? "folder" : "file"));
}

std::string described(const SafetensorsEntry& entry) {
  return fmt::format("{} [{}]", entry.dtype, fmt::join(entry.shape, ", "));
}

/// NaN equals NaN.
at::Tensor unequal(const at::Tensor& x, const at::Tensor& y) {
  return x.ne(y).logical_and(x.isnan().logical_and(y.isnan()).logical_not());
}

void compare(const at::Tensor& a, const at::Tensor& b, TensorDifference& difference) {
  const bool complex = a.is_complex() || b.is_complex();
  const auto wide = complex ? at::kComplexDouble : at::kDouble;
  const auto x = a.to(wide), y = b.to(wide);
  // Integers of 64 bits do not all fit into a double.
  const bool integers = a.scalar_type() == at::kLong && b.scalar_type() == at::kLong;
  const auto differs = integers  ? a.ne(b)
                       : complex ? unequal(at::view_as_real(x), at::view_as_real(y)).any(-1)
                                 : unequal(x, y);
  difference.elements = differs.sum().item<int64_t>();
  if (difference.elements == 0) return;
  auto distance = x.sub(y).abs();
  if (integers) distance = at::where(distance.eq(0), a.sub(b).abs().to(wide), distance);
  difference.largest = distance.masked_select(differs).max().item<double>();
}

/// True if this libtorch has the dtype.
bool is_held(const std::string& dtype) { return safetensors::scalar_type(dtype).has_value(); }

void compare_bytes(const at::Tensor& a, const at::Tensor& b, TensorDifference& difference) {
  const auto bytes = a.ne(b).sum().item<int64_t>();
  if (bytes > 0)
    difference.note = fmt::format("{} bytes differ, of a dtype that this libtorch lacks", bytes);
}

/// transformers gives a model the dtype that its config.json names.
void set_dtype_of_config(const fs::path& path, at::ScalarType type) {
  const std::map<at::ScalarType, std::string> names{{at::kFloat, "float32"},
                                                    {at::kDouble, "float64"},
                                                    {at::kHalf, "float16"},
                                                    {at::kBFloat16, "bfloat16"}};
  auto config = nlohmann::ordered_json::parse(read_file("weights", path.string()), nullptr,
                                              /*allow_exceptions=*/false);
  if (!config.is_object() || names.count(type) == 0) return;
  bool found = false;
  for (const char* key : {"dtype", "torch_dtype"}) {
    if (!config.contains(key)) continue;
    config[key] = names.at(type);
    found = true;
  }
  if (found) write_file(path.string(), config.dump(2) + "\n");
}

}  // namespace

std::string weights_digest(const Weights& weights, const std::string& name) {
  const at::Tensor bytes = weights.load_bytes(name);
  return store::digest_of(bytes.numel() > 0 ? bytes.data_ptr() : "", bytes.nbytes());
}

void convert_weights(const Weights& from, const std::string& to, const ConvertOptions& options) {
  const bool folder = is_weights_folder(to);
  const auto specs = specs_of(from, options);
  if (folder && specs.empty())
    throw UsageError("weights: " + from.path() + ": has no tensors; expected some for a folder");
  check_distinct(from, to);
  auto parts = folder ? divide_weights(specs, 1, specs.size(), options.max_shard_bytes)
                      : divide_weights(specs, 1);
  if (folder) name_parts(parts, make_weights_folder(to, parts));
  const SafetensorsMetadata metadata{{"format", "pt"}};
  PartWriters writers(to, specs, metadata);
  for (const auto& part : parts) {
    writers.begin(part);
    for (const size_t i : part.tensors) writers.write(i, converted(from, specs[i]));
  }
  writers.commit();
  if (!folder) return;
  finish_weights_folder(to, parts, weights_index_text(specs, parts));
  const fs::path source = fs::path(from.path()).parent_path();
  if (!fs::exists(source / "config.json")) return;
  const auto copied = copy_other_files(source.string(), to);
  if (options.dtype && std::find(copied.begin(), copied.end(), "config.json") != copied.end())
    set_dtype_of_config(fs::path(to) / "config.json", *options.dtype);
}

std::vector<std::string> copy_other_files(const std::string& from, const std::string& to) {
  constexpr uintmax_t kMost = 100'000'000;
  std::vector<std::string> copied;
  std::error_code ignored;
  if (fs::equivalent(from, to, ignored)) return copied;
  const auto names = list_folder(from);
  if (!names)
    throw Error(fmt::format("weights: {}: cannot be listed: {}", from, errno_text(errno)));
  for (const auto& name : *names) {
    const auto path = fs::path(from) / name;
    if (!fs::is_regular_file(path) || name[0] == '.' || holds_weights(path) ||
        fs::file_size(path) > kMost)
      continue;
    if (const auto target = link_outside(path); !target.empty()) {
      spdlog::warn("tessera: weights: {} is not copied: it is a link to {}, outside of its folder",
                   path.string(), target.string());
      continue;
    }
    write_file((fs::path(to) / name).string(), read_file("weights", path.string()));
    copied.push_back(name);
  }
  std::sort(copied.begin(), copied.end());
  return copied;
}

std::vector<TensorDifference> compare_weights(const Weights& first, const Weights& second) {
  std::set<std::string> names;
  for (const auto* weights : {&first, &second})
    for (const auto& entry : weights->entries()) names.insert(entry.name);
  std::vector<TensorDifference> differences;
  for (const auto& name : names) {
    auto& difference = differences.emplace_back();
    difference.name = name;
    if (!second.contains(name)) difference.note = "only in the first";
    else if (!first.contains(name)) difference.note = "only in the second";
    else if (first.info(name).shape != second.info(name).shape)
      difference.note = described(first.info(name)) + " and " + described(second.info(name));
    else if (!is_held(first.info(name).dtype) && first.info(name).dtype == second.info(name).dtype)
      compare_bytes(first.load_bytes(name), second.load_bytes(name), difference);
    else compare(first.load(name), second.load(name), difference);
  }
  return differences;
}

}  // namespace tessera
