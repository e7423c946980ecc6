#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "sharding/named_tensor.h"
#include "tessera/process_group.h"
#include "tessera/step/buffer_sync.h"

namespace tessera::sharding {

/// The buffers of a module, and the rule by which they become the same on all ranks. Every wrapper
/// has one.
class ModuleBuffers {
 public:
  /// No buffers.
  ModuleBuffers() = default;
  ModuleBuffers(const torch::nn::Module& module, BufferSync rule);

  bool empty() const { return buffers_.empty(); }
  /// Lines for a contract between ranks: the buffers and the rule. Local.
  std::vector<std::string> signatures() const;

  /// All ranks get root's buffers, whatever the rule. Collective: one broadcast for each dtype.
  void broadcast(ProcessGroup& group, int root) const;
  /// Applies the rule. `has_data`: false on a rank without data in a join; its values are ignored.
  /// Autograd's version counters do not change, as batch norm itself does not change them, so a
  /// graph that is kept stays valid. Collective: one call for each dtype.
  void synchronize(ProcessGroup& group, bool has_data = true) const;
  /// True if synchronize() is collective.
  bool synchronizes() const { return rule_ != BufferSync::none && !buffers_.empty(); }

  /// For an iteration of a join: `publisher` is a rank with data, whose buffers are broadcast;
  /// `active_ranks` ranks have data. Local.
  void set_active(int publisher, int active_ranks);

 private:
  /// Indices of the buffers, in lists of equal dtype and device. Precision options change dtypes.
  std::vector<std::vector<size_t>> classes() const;
  enum class Combine { copy, mean };
  void combine(ProcessGroup& group, const std::vector<size_t>& members, Combine how, int root,
               bool has_data) const;

  std::vector<NamedTensor> buffers_;
  BufferSync rule_ = BufferSync::none;
  int publisher_ = 0;
  int active_ranks_ = 0;  // 0: all
};

/// On rank 0 of several: logs that `component` was made from parameter groups alone, so that
/// nothing keeps the buffers of their module equal.
void report_no_module(const char* component, const ProcessGroup& group);

}  // namespace tessera::sharding
