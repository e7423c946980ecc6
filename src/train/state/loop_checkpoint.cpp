#include "tessera/train/loop_checkpoint.h"

#include <set>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "tessera/error.h"
#include "tessera/step/agreement.h"
#include "train/state/checkpoint_to_resume.h"
#include "train/state/random_state.h"

namespace tessera {
namespace {

constexpr const char* kWeights = "model.safetensors";

std::string samples_of(int rank) { return fmt::format("samples-{:05}.safetensors", rank); }
std::string random_of(int rank) { return fmt::format("random-{:05}.safetensors", rank); }

std::vector<std::pair<std::string, at::Tensor>> tensors_of(const Checkpoint& checkpoint,
                                                           const std::string& file) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& name : checkpoint.tensors(file).names())
    tensors.emplace_back(name, checkpoint.load_tensor(file, name));
  return tensors;
}

/// Of the ranks that saved samples, rank `rank` of `ranks` gets those of every `ranks`-th one.
void load_samples(const Checkpoint& checkpoint, int rank, int ranks, SampleBuffer& buffer) {
  if (!checkpoint.contains(samples_of(0)))
    throw UsageError(checkpoint.path() +
                     ": it has no samples; expected a checkpoint of a loop with a SampleBuffer");
  for (int from = rank; from < checkpoint.world_size(); from += ranks) {
    const auto state = tensors_of(checkpoint, samples_of(from));
    if (from == rank) {
      buffer.load_state(state);
      continue;
    }
    at::Tensor inputs, targets;
    for (const auto& [name, tensor] : state) {
      if (name == "inputs") inputs = tensor;
      if (name == "targets") targets = tensor;
    }
    if (inputs.defined()) buffer.add(inputs, targets);
  }
}

/// Adds those of `chosen` that are not among `shards`.
void add_whole(const torch::nn::Module& net, std::vector<ParameterShard>& shards,
               bool (*chosen)(const at::Tensor&)) {
  std::set<std::string> there;
  for (const auto& shard : shards) there.insert(shard.parameter);
  for (const auto& [name, tensor] : named_parameters(net))
    if (tensor.defined() && tensor.numel() > 0 && chosen(tensor) && !there.contains(name))
      shards.push_back(whole_shard(name, tensor));
}

}  // namespace

LoopParts::LoopParts(torch::nn::Module& net, torch::optim::Optimizer& optimizer,
                     SampleBuffer* buffer, bool rng)
    : buffer_(buffer), rng_(rng) {
  std::vector<ParameterShard> shards;
  add_whole(net, shards, [](const at::Tensor&) { return true; });
  weights_ = [&net] { return state_dict(net); };
  load_weights_ = [&net](const ModuleStateDict& state) { load_state_dict(net, state); };
  shards_ = [shards] { return shards; };
  slices_ = [&optimizer, shards](int rank) {
    return rank == 0 ? state_slices(optimizer, shards) : std::vector<StateSlice>();
  };
  load_slices_ = [&optimizer, shards](std::vector<StateSlice> slices) {
    load_state_slices(optimizer, shards, std::move(slices));
  };
}

LoopParts::LoopParts(torch::nn::Module& net, ZeroRedundancyOptimizer& optimizer,
                     SampleBuffer* buffer, bool rng)
    : buffer_(buffer), rng_(rng) {
  weights_ = [&net] { return state_dict(net); };
  load_weights_ = [&](const ModuleStateDict& state) {
    optimizer.with_shared_write([&] { load_state_dict(net, state); });
  };
  shards_ = [&] {
    auto shards = optimizer.shards();
    add_whole(net, shards, [](const at::Tensor& tensor) { return !tensor.requires_grad(); });
    return shards;
  };
  slices_ = [&optimizer](int) { return optimizer.state_slices(); };
  load_slices_ = [&optimizer](std::vector<StateSlice> slices) {
    optimizer.load_state_slices(std::move(slices));
  };
}

LoopParts::LoopParts(FullyShardedDataParallelBase& fsdp, torch::optim::Optimizer& optimizer,
                     SampleBuffer* buffer, bool rng)
    : buffer_(buffer), rng_(rng) {
  weights_ = [&fsdp] { return fsdp.state_dict(); };
  load_weights_ = [&fsdp](const ModuleStateDict& state) { fsdp.load_state_dict(state); };
  shards_ = [&fsdp] { return fsdp.shards(true); };
  slices_ = [&fsdp, &optimizer](int) {
    return fsdp.first_replica() ? state_slices(optimizer, fsdp.shards(true))
                                : std::vector<StateSlice>();
  };
  load_slices_ = [&fsdp, &optimizer](std::vector<StateSlice> slices) {
    load_state_slices(optimizer, fsdp.shards(true), std::move(slices));
  };
}

std::string save(const CheckpointStore& store, int64_t step, const LoopParts& parts) {
  const int rank = store.group().rank();
  const ModuleStateDict weights = parts.weights_();
  CheckpointWriter writer(store, step);
  if (rank == 0) writer.add_tensors(kWeights, weights);
  writer.add_slices(parts.slices_(rank));
  if (parts.buffer_ != nullptr) writer.add_tensors(samples_of(rank), parts.buffer_->state());
  if (parts.rng_) writer.add_tensors(random_of(rank), train::random_state(at::kCPU));
  return writer.commit();
}

int64_t load(const CheckpointStore& store, const LoopParts& parts) {
  const ProcessGroup& group = store.group();
  const auto [path, warning] = train::checkpoint_to_resume(store.folder(), group);
  if (!warning.empty() && group.rank() == 0) spdlog::warn("tessera: {}", warning);
  if (path.empty()) return 0;
  const Checkpoint checkpoint(path, group);
  checkpoint.verify(group);
  const auto shards = parts.shards_();
  ModuleStateDict weights;
  std::vector<StateSlice> slices;
  std::vector<std::pair<std::string, at::Tensor>> random;
  SampleBuffer samples = parts.buffer_ != nullptr ? *parts.buffer_ : SampleBuffer();
  checkpoint.read_together([&] {  // an error changes nothing
    weights = tensors_of(checkpoint, kWeights);
    slices = checkpoint.load_slices({shards.begin(), shards.end()});
    if (parts.buffer_ != nullptr) load_samples(checkpoint, group.rank(), group.size(), samples);
    if (parts.rng_ && group.size() == checkpoint.world_size() &&
        checkpoint.contains(random_of(group.rank())))
      random = tensors_of(checkpoint, random_of(group.rank()));
  });
  agree(group, [&] {
    if (parts.buffer_ != nullptr) *parts.buffer_ = std::move(samples);
    train::set_random_state(random, at::kCPU);
    parts.load_weights_(weights);
    parts.load_slices_(std::move(slices));
  });
  return checkpoint.step();
}

}  // namespace tessera
