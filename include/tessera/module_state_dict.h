#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/safetensors.h"
#include "tessera/weights/weights.h"

// The parameters and buffers of a plain module by name: the form that
// FullyShardedDataParallel::state_dict() returns and save_state_dict() writes. All functions are
// local.

#pragma GCC visibility push(default)
namespace tessera {

/// Dotted names and tensors. A tied parameter appears once, under its first name.
using ModuleStateDict = std::vector<std::pair<std::string, at::Tensor>>;

/// The parameters, then the buffers of `module`. The tensors are copies on the CPU.
ModuleStateDict state_dict(const torch::nn::Module& module);

/// Copies the tensors of `state` into all parameters and buffers of `module`, and converts dtype
/// and device. Throws UsageError, and changes nothing, when names are missing or unexpected (it
/// lists them), when a name is given twice, or when a shape differs (it names the first). A tied
/// parameter or buffer may have any of its names, or several with equal values. Without `strict`,
/// names that are missing or unexpected are no error; they are returned. A different shape, and a
/// complex tensor for a real one, always are an error.
UnmatchedNames load_state_dict(torch::nn::Module& module, const ModuleStateDict& state,
                               bool strict = true);
/// The same from weights on disk: a file, an index or a folder; see Weights.
UnmatchedNames load_state_dict(torch::nn::Module& module, const std::string& path,
                               bool strict = true);
/// The same from opened weights. A tensor that is deferred
/// (deferred_init()) is read when its values are needed, so the files must stay as they are until
/// then.
UnmatchedNames load_state_dict(torch::nn::Module& module, const Weights& weights,
                               bool strict = true);

/// The entries that load_state_dict(module, weights, strict) reads, by name. Throws the same
/// errors; reads no tensor and changes nothing.
WeightsMatch match_weights(const torch::nn::Module& module, const TensorSource& weights,
                           bool strict = true);

namespace detail {

/// The entries of a state in memory, with the dtypes of complex ones. UsageError, which begins with
/// `source`, for an undefined tensor.
std::vector<SafetensorsEntry> entries_of(const std::string& source, const ModuleStateDict& state);
/// match_weights() of any source of tensors. `source`: its name, for messages; `entries`: its
/// tensors.
WeightsMatch match_entries(const torch::nn::Module& module, const std::string& source,
                           const std::vector<SafetensorsEntry>& entries, bool strict = true);
/// Throws UsageError if tensors of WeightsMatch::equal differ.
void check_equal(const std::string& source, const WeightsMatch& match,
                 const std::function<at::Tensor(const std::string& name)>& load);

/// load_state_dict() from any source of tensors. `later`: writes a tensor's values to `into`; for
/// deferred tensors (deferred_init()), for which it is called when their values are needed. Empty:
/// these are loaded at once, too.
UnmatchedNames load_module(
    torch::nn::Module& module, const std::string& source,
    const std::vector<SafetensorsEntry>& entries,
    const std::function<at::Tensor(const std::string& name)>& load, bool strict = true,
    const std::function<void(const std::string& name, at::Tensor into)>& later = {});

}  // namespace detail
}  // namespace tessera
#pragma GCC visibility pop
