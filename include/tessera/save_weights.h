#pragma once

#include <cstddef>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tessera/process_group.h"
#include "tessera/safetensors_weights.h"

// Whole weights, written by all ranks at once, one tensor at a time on each.

#pragma GCC visibility push(default)
namespace tessera {

/// Brings tensor number `i` to rank `to` and returns it there; an undefined tensor elsewhere, or
/// the rank's own copy, which is then ignored. Collective if the tensor is cut over ranks. `i`
/// counts the tensors of divide_weights().
using WholeTensor = std::function<at::Tensor(size_t i, int to)>;

/// Brings every tensor to the rank of its part, where `write` gets it. In each round every rank
/// gets one tensor and only then the ranks write, all at the same time. Each rank thus has at most
/// one whole tensor. `write` must not throw on one rank alone. Collective if `whole` is.
void write_weights(const std::vector<WeightsPart>& parts, int rank, const WholeTensor& whole,
                   const std::function<void(size_t i, const at::Tensor& tensor)>& write);

struct SaveWeightsOptions {
  /// A folder's files have at most this many bytes, or one tensor.
  uint64_t max_shard_bytes = std::numeric_limits<uint64_t>::max();
  SafetensorsMetadata metadata = {};
  /// The tensors from this number on are those of rank 0, such as buffers.
  size_t rank0_from = std::numeric_limits<size_t>::max();
  /// Called on the rank that writes it for each tensor; an exception ends the saving on all ranks.
  std::function<void(size_t i, const at::Tensor& tensor)> check = {};
};

/// True if save_weights() writes a folder: the path ends in "/".
bool is_weights_folder(const std::string& path);

/// The files in `folder` that a save to it replaces or removes, with their paths; also the index
/// and model.safetensors if they are not there yet.
std::vector<std::string> weights_files_of(const std::string& folder);

/// True if save_weights() writes a file for torch.load: the path ends in ".pt", ".pth" or ".bin".
bool is_torch_path(const std::string& path);

/// Writes weights to `path`: to one file, which rank 0 writes and which is replaced in one step:
/// for torch.load if is_torch_path(), otherwise safetensors. A path that ends in "/" is a folder,
/// which is made if it is missing and must be visible to all ranks: each rank writes its parts, by
/// divide_weights(), and rank 0 writes model.safetensors.index.json at the end. A save that is cut
/// off leaves the former one: new parts whose names are taken by former parts get a tag
/// (model-1f03-00001-of-00002.safetensors). Then model.safetensors and the parts of former saves
/// are removed from the folder. Takes memory for one tensor on each rank. Throws AgreedError on all
/// ranks, with file, rank and reason, if a rank cannot write its part. Collective.
void save_weights(const ProcessGroup& group, const std::string& path,
                  const std::vector<SafetensorsSpec>& tensors, const WholeTensor& whole,
                  const SaveWeightsOptions& options = {});

}  // namespace tessera
#pragma GCC visibility pop
