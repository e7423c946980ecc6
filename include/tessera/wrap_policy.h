#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/config/registry.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Decides whether a submodule becomes a unit of FullyShardedDataParallel, which is gathered and
/// released as a whole. It is called once for every submodule, children before parents. `name`: the
/// path from the root ("blocks.3"). `unwrapped_numel`: the number of elements in the submodule's
/// parameters that do not belong to a unit yet. The policy must return the same on all ranks. The
/// root is always a unit; an empty policy makes no other unit. After PyTorch's wrap policies.
using WrapPolicy = std::function<bool(torch::nn::Module& module, const std::string& name,
                                      int64_t unwrapped_numel)>;

/// Modules with at least `min_numel` elements that do not belong to a unit yet, but no ModuleList
/// and no ModuleDict, which are containers without a forward. UsageError unless `min_numel` > 0.
WrapPolicy wrap_by_size(int64_t min_numel = 100'000'000);

/// Modules whose name matches a pattern, such as "blocks.*" or "**.mlp": `*` stands for any
/// characters but dots, `**` for any characters, `?` for one character. UsageError for an empty
/// pattern and when there are no patterns.
WrapPolicy wrap_by_name(std::vector<std::string> patterns);

/// Modules of one of these types, as in wrap_by_type<BlockImpl>().
template <class... Modules>
WrapPolicy wrap_by_type() {
  return [](torch::nn::Module& module, const std::string&, int64_t) {
    return ((dynamic_cast<Modules*>(&module) != nullptr) || ...);
  };
}

/// Every module that has parameters of its own.
WrapPolicy wrap_leaves();

/// Wrap policies by name. The library's own: "size_based" {min_numel}, "name_based" {patterns},
/// "leaves" and "none". Add your own with add(): its function reads the policy's options with an
/// OptionReader and returns the policy.
using WrapPolicyRegistry = Registry<WrapPolicy>;

/// A registry with the library's wrap policies.
WrapPolicyRegistry default_wrap_policies();

}  // namespace tessera
#pragma GCC visibility pop
