#include "train/run/run_contract.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>
#include <xxhash.h>

#include "tessera/config/option_reader.h"
#include "tessera/data/batch_loader.h"
#include "tessera/detail/report_to_launcher.h"
#include "tessera/detail/resolved.h"
#include "tessera/optim/optimizer_state.h"
#include "tessera/step/agreement.h"

namespace tessera::train {
namespace {

/// Names and values in a fixed order.
using Lines = std::vector<std::pair<std::string, std::string>>;

std::string value_of(const Lines& lines, const std::string& key) {
  const auto found =
      std::find_if(lines.begin(), lines.end(), [&](const auto& line) { return line.first == key; });
  return found == lines.end() ? "absent" : found->second;
}

/// "0.001 on ranks 0, 2; 0.01 on rank 1"; empty if all ranks have the same value.
std::string differing_values(const std::vector<Lines>& ranks, const std::string& key) {
  std::vector<std::pair<std::string, std::vector<size_t>>> groups;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto value = value_of(ranks[rank], key);
    auto group = std::find_if(groups.begin(), groups.end(),
                              [&](const auto& other) { return other.first == value; });
    if (group == groups.end()) group = groups.insert(groups.end(), {value, {}});
    group->second.push_back(rank);
  }
  if (groups.size() < 2) return "";
  std::vector<std::string> texts;
  for (const auto& [value, members] : groups)
    texts.push_back(fmt::format("{} on rank{} {}", value, members.size() == 1 ? "" : "s",
                                fmt::join(members, ", ")));
  return fmt::format("{}", fmt::join(texts, "; "));
}

/// Throws on all ranks, for the first key that differs.
void check_same(const ConfigSource& config, const Lines& lines, ProcessGroup& group) {
  const auto replace = nlohmann::json::error_handler_t::replace;
  const std::string mine = nlohmann::json(lines).dump(-1, ' ', false, replace);
  const auto digest = fmt::format("{:016x}", XXH64(mine.data(), mine.size(), 0));
  const auto digests = group.all_gather_bytes(digest, "digest of what ranks must have in common");
  if (std::equal(digests.begin() + 1, digests.end(), digests.begin())) return;
  const auto began = detail::minority(group.size(), [&](int a, int b) {
    return digests[static_cast<size_t>(a)] == digests[static_cast<size_t>(b)];
  });
  std::vector<Lines> ranks;
  for (const auto& bytes : group.all_gather_bytes(mine, "what ranks must have in common"))
    ranks.push_back(nlohmann::json::parse(bytes).get<Lines>());
  for (const auto& rank : ranks) {
    for (const auto& [key, value] : rank) {
      const auto values = differing_values(ranks, key);
      if (!values.empty()) {
        const auto text = fmt::format("{}the ranks differ: {}; expected the same on all ranks",
                                      config.at(key), values);
        detail::report_agreed(began, text);
        throw AgreedError(text);
      }
    }
  }
  throw AgreedError("the ranks differ in the order of their options");
}

/// Numbers of samples that are spread over a split, the first and the last among them.
std::vector<int64_t> spread_samples(int64_t size) {
  constexpr int64_t kSamples = 16;
  const int64_t count = std::min(kSamples, size);
  std::vector<int64_t> samples;
  for (int64_t i = 0; i < count; ++i)
    samples.push_back(
        count == 1 ? 0
                   : static_cast<int64_t>(static_cast<double>(size - 1) * static_cast<double>(i) /
                                          static_cast<double>(count - 1)));
  return samples;
}

std::vector<std::pair<std::string, at::Tensor>> tensors_of(const Batch& batch) {
  std::vector<std::pair<std::string, at::Tensor>> tensors{{"inputs", batch.inputs},
                                                          {"targets", batch.targets}};
  tensors.insert(tensors.end(), batch.extra.begin(), batch.extra.end());
  return tensors;
}

std::string layout_of(const Batch& batch) {
  std::string text;
  for (const auto& [name, tensor] : tensors_of(batch)) {
    text += fmt::format("{}{} ", text.empty() ? "" : ", ", name);
    text += tensor.defined() ? fmt::format("{} [{}]", c10::toString(tensor.scalar_type()),
                                           fmt::join(tensor.sizes(), ", "))
                             : "undefined";
  }
  return text;
}

uint64_t digest_of(const Batch& batch) {
  uint64_t digest = 0;
  for (const auto& [name, tensor] : tensors_of(batch)) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) continue;
    const auto bytes = detail::resolved(tensor).contiguous();
    digest = XXH64(bytes.data_ptr(), bytes.nbytes(), digest);
  }
  return digest;
}

void add_split(Lines& lines, const std::string& name, const Dataset* data) {
  if (data == nullptr) {
    lines.emplace_back(name, "none");
    return;
  }
  lines.emplace_back(name + ", number of samples", std::to_string(data->size()));
  const auto samples = spread_samples(data->size());
  const Batch batch = load_batch(*data, samples);
  const uint64_t digest = digest_of(batch);
  const bool repeatable = digest == digest_of(data->get(samples));
  lines.emplace_back(name + ", samples", layout_of(batch));
  lines.emplace_back(
      name + fmt::format(", samples {}", fmt::join(samples, ", ")),
      repeatable ? fmt::format("digest {:016x}", digest) : "not the same in two reads");
}

}  // namespace

void check_same_config(const Config& config, ProcessGroup& group) {
  static const std::set<std::string> may_differ{"train.log", "train.log_every",
                                                "data.loader_threads", "data.prefetch"};
  if (group.size() == 1) return;
  Lines lines;
  if (config.options) {
    for (const auto& option : *config.options) {
      const std::string key = fmt::format("{}", fmt::join(option.path, "."));
      if (may_differ.count(key) == 0) {
        std::string value = config.value(key);
        std::replace(value.begin(), value.end(), '\n', ' ');
        lines.emplace_back(key, value);
      }
    }
  }
  check_same(config, lines, group);
}

void check_same_data(const Config& config, const DataSplits& data, ProcessGroup& group) {
  if (group.size() == 1) return;
  Lines lines;
  agree(group, [&] {
    add_split(lines, "data.train", data.train.get());
    add_split(lines, "data.val", data.val.get());
    add_split(lines, "data.test", data.test.get());
  });
  check_same(config, lines, group);
}

void check_same_options(const ModelSections& config, torch::optim::Optimizer& optimizer,
                        ProcessGroup& group) {
  Lines lines;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const auto& [name, value] : get_options(optimizer.param_groups()[g].options()))
      lines.emplace_back(fmt::format("optimizer, group {}, {}", g, name), to_string(value));
  check_same(config, lines, group);
}

}  // namespace tessera::train
