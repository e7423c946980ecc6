#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/config/option_reader.h"
#include "tessera/optim/partition.h"
#include "tessera/step/buffer_sync.h"
#include "tessera/step/overlap.h"
#include "tessera/train/model_wrapper.h"

// Functions that several wrappers use. All are local.

namespace tessera::train {

int64_t bytes_of(const std::vector<at::Tensor>& tensors);
/// The bytes of the tensors in `slices`.
int64_t bytes_of(const std::vector<StateSlice>& slices);

/// The configured optimizer over `groups`: tensors with their options.
std::unique_ptr<torch::optim::Optimizer> make_optimizer(
    const OptimizerPlan& plan,
    const std::vector<std::pair<std::vector<at::Tensor>, OptionMap>>& groups);

/// The parameter `name` of this rank's `module`.
at::Tensor own_parameter(const torch::nn::Module& module, const std::string& name);

/// Reads the key `buffers`.
void read_buffers(OptionReader& options, BufferSync& buffers);
/// Option `wire`. `gathers`: parameters travel too.
void read_wire(OptionReader& options, WireOptions& wire, bool gathers);

/// Reads the key `overlap`. Unless given: `background` where ranks are on several hosts.
void read_overlap(OptionReader& options, std::optional<Overlap>& overlap);
/// `options` with the overlap of a wrapper in `group`.
template <class Options>
Options with_overlap(Options options, const std::optional<Overlap>& given,
                     const ProcessGroup& group) {
  options.overlap =
      given.value_or(group.messages_between_hosts() ? Overlap::background : Overlap::backward);
  return options;
}

/// The partitions with their names in a config.
const std::vector<std::pair<std::string, Partition>>& partition_names();

/// Adds the frozen parameters that the ranks of a host share, on its first rank alone: as tensors
/// over their memory, which may be written.
void add_shared_frozen(std::vector<ParameterShard>& shards, const torch::nn::Module& module,
                       const ProcessGroup& group);

}  // namespace tessera::train
