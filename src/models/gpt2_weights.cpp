#include <algorithm>
#include <map>
#include <memory>
#include <set>

#include <fmt/ranges.h>

#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/models/gpt2.h"
#include "tessera/module_state_dict.h"
#include "tessera/safetensors.h"
#include "tessera/weights/weights.h"

namespace tessera {
namespace {

constexpr const char* kPrefix = "transformer.";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kEmbedding = "transformer.wte.weight";

/// True for the mask buffers that older files contain.
bool is_mask(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

std::string with_prefix(const std::string& name) {
  return name.starts_with(kPrefix) || name == kHead ? name : kPrefix + name;
}

std::string shape_text(at::IntArrayRef shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

/// Collects the faults of a file, so that one message names all of them (the first 5 of each kind).
class Faults {
 public:
  void add(const std::string& kind, const std::string& item) { kinds_[kind].push_back(item); }

  /// Throws UsageError if there are any.
  void raise(const std::string& path) const {
    if (kinds_.empty()) return;
    std::string text = "GPT2: " + path + " does not fit the model";
    for (const auto& [kind, items] : kinds_) {
      text += "; " + std::to_string(items.size()) + " " + kind + ": ";
      for (size_t i = 0; i < items.size() && i < 5; ++i) text += (i == 0 ? "" : ", ") + items[i];
      text += items.size() > 5 ? ", …" : "";
    }
    throw UsageError(text);
  }

 private:
  std::map<std::string, std::vector<std::string>> kinds_;
};

/// The name in the file of each parameter that it has. Adds wrong shapes to `faults` and, if
/// `strict`, missing and unexpected names.
WeightsMatch match(const TensorSource& file,
                   const torch::OrderedDict<std::string, at::Tensor>& parameters, bool tied,
                   bool strict, Faults& faults) {
  WeightsMatch result;
  auto& names = result.names;
  auto& [missing, unexpected] = result.unmatched;
  for (const SafetensorsEntry& entry : file.entries()) {
    const std::string name = with_prefix(entry.name);
    const at::Tensor* parameter = parameters.find(name);
    if (parameter == nullptr) {
      if (!is_mask(name) && !(tied && name == kHead)) unexpected.push_back(entry.name);
    } else if (!names.emplace(name, entry.name).second) {
      faults.add("given twice, with and without \"transformer.\"", "\"" + name + "\"");
    } else if (parameter->sizes() != at::IntArrayRef(entry.shape)) {
      faults.add("of another shape", "\"" + name + "\" is " + shape_text(entry.shape) +
                                         ", the model has " + shape_text(parameter->sizes()));
    }
  }
  // A writer that stores shared memory once may have used the name of the head.
  if (tied && names.count(kEmbedding) == 0 && file.contains(kHead) &&
      parameters[kEmbedding].sizes() == at::IntArrayRef(file.info(kHead).shape))
    names.emplace(kEmbedding, kHead);
  for (const auto& item : parameters)
    if (names.count(item.key()) == 0) missing.push_back(item.key());
  if (!strict) return result;
  for (const std::string& name : missing) faults.add("missing", "\"" + name + "\"");
  for (const std::string& name : unexpected)
    faults.add("unexpected", "\"" + name + "\"" + did_you_mean(with_prefix(name), missing));
  return result;
}

}  // namespace

void GPT2Impl::load_weights(const std::string& path) { load_weights(Weights(path)); }

WeightsMatch GPT2Impl::match_weights(const TensorSource& file, bool strict) const {
  const bool tied = options_.tie_word_embeddings;
  Faults faults;
  WeightsMatch result = match(file, named_parameters(), tied, strict, faults);
  faults.raise(file.path());
  const auto embedding = result.names.find(kEmbedding);
  if (tied && file.contains(kHead) && embedding != result.names.end() &&
      embedding->second != kHead) {
    if (file.info(kHead).shape != file.info(embedding->second).shape)
      throw UsageError("GPT2: " + file.path() + ": \"" + kHead + "\" has shape " +
                       shape_text(file.info(kHead).shape) + "; expected that of \"" +
                       embedding->second + "\", because the model ties them");
    result.equal.push_back(
        {embedding->second, kHead, ", but the model ties them; set tie_word_embeddings to false"});
  }
  return result;
}

UnmatchedNames GPT2Impl::load_weights(const Weights& file, bool strict) {
  const WeightsMatch match = match_weights(file, strict);
  detail::check_equal("GPT2: " + file.path(), match,
                      [&](const auto& name) { return file.load(name); });
  const torch::NoGradGuard no_grad;
  for (auto& item : named_parameters()) {
    const auto found = match.names.find(item.key());
    if (found == match.names.end()) continue;
    const auto later = [file, name = found->second](at::Tensor into) {
      file.load_into(name, into);
    };
    if (!detail::load_later(item.value(), later)) item.value().copy_(file.load(found->second));
  }
  return match.unmatched;
}

void GPT2Impl::save_weights(const std::string& path) const {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& item : named_parameters()) tensors.emplace_back(item.key(), item.value());
  save_safetensors(path, tensors, {{"format", "pt"}});
}

}  // namespace tessera
