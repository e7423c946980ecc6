#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/optim/option_map.h"

namespace tessera {

/// Decides whether a submodule becomes a unit of FullyShardedDataParallel: gathered and released as
/// a whole. Asked once for every submodule, children before parents; `name` is the path from the
/// root ("blocks.3"), `unwrapped_numel` the elements of the parameters in it that are not in a unit
/// yet. Must answer alike on all ranks. The root is always a unit; an empty policy makes no other.
/// Follows PyTorch's wrap policies.
using WrapPolicy = std::function<bool(torch::nn::Module& module, const std::string& name,
                                      int64_t unwrapped_numel)>;

/// Modules with at least `min_numel` elements (> 0) that are not in a unit yet.
WrapPolicy wrap_by_size(int64_t min_numel = 100'000'000);

/// Modules whose name matches a pattern: `*` stands for any characters but dots, `**` for any, `?`
/// for one. "blocks.*", "**.mlp".
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

/// Policies by name, for configurations: "size_based" {min_numel}, "name_based" {patterns, joined
/// by commas}, "leaves", "none", and what was added. UsageError for an unknown name or option (with
/// the nearest) and for impossible values.
class WrapPolicyRegistry {
 public:
  using Maker = std::function<WrapPolicy(const OptionMap& options)>;

  /// Throws UsageError when the name is taken.
  void add(const std::string& name, Maker make);
  WrapPolicy make(const std::string& name, const OptionMap& options = {}) const;
  std::vector<std::string> names() const;

 private:
  std::map<std::string, Maker> makers_;
};

/// A registry with the library's policies.
WrapPolicyRegistry default_wrap_policies();

}  // namespace tessera
