#pragma once

#include <string>
#include <vector>

#include <torch/torch.h>

#include "tessera/process_group.h"

namespace tessera {

/// Batch normalisation over the batch of all ranks: as one process computes it on the concatenation
/// of the ranks' inputs, forward and backward, whatever part of the batch each rank has (none is
/// fine on some ranks, not on all).
///
/// Input [N, C, …], any number of dimensions from two on. In training mode forward and backward are
/// collective, one small collective each, and block; in eval mode it is local and uses the running
/// statistics (without them, this rank's own batch, as BatchNorm does). The gradients of weight and
/// bias are this rank's part of the sum: DistributedDataParallel averages them with the others.
/// Options, parameters and buffers have the names and meaning of torch::nn::BatchNorm. Give it a
/// group of its own (ProcessGroup::split) where other collectives go on during backward, as
/// DistributedDataParallel's do; convert_sync_batch_norm does so.
class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(torch::nn::BatchNormOptions options, ProcessGroup group);
  /// Shares the parameters and buffers of a torch::nn::BatchNorm…d.
  template <class BatchNorm>
  SyncBatchNormImpl(const BatchNorm& plain, ProcessGroup process_group, std::nullptr_t)
      : options(plain.options),
        weight(plain.weight),
        bias(plain.bias),
        running_mean(plain.running_mean),
        running_var(plain.running_var),
        num_batches_tracked(plain.num_batches_tracked),
        group_(std::move(process_group)) {
    enlist(weight.defined() && weight.requires_grad());
    train(plain.is_training());
  }

  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  torch::Tensor weight, bias;  ///< [C]; undefined without affine.
  torch::Tensor running_mean, running_var,
      num_batches_tracked;  ///< [C], [C], []; undefined without track_running_stats.

 private:
  void enlist(bool trainable);

  ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Puts a SyncBatchNorm in the place of each BatchNorm1d, 2d and 3d that is an element of a
/// torch::nn::Sequential (at any depth) in `module`; parameters and buffers stay the same tensors.
/// C++ modules that keep a layer in a member of their own call that member, which nobody can
/// exchange from outside: for such layers UsageError names them all, and nothing is changed;
/// declare those members as tessera::SyncBatchNorm. Returns the names of the converted layers.
/// Collective: makes one sub-group of `group`.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, ProcessGroup group);

}  // namespace tessera
