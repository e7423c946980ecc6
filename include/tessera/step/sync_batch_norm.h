#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/pimpl.h>

#include "tessera/process_group.h"

#pragma GCC visibility push(default)
namespace tessera {

/// Batch normalisation over the batch of all ranks. Forward and backward compute what one process
/// computes on the concatenation of the ranks' inputs. The ranks may have parts of different sizes;
/// some of them may be empty, but not all.
///
/// The input is [N, C, …] with two or more dimensions. In training mode forward and backward are
/// collective and block; each makes one small collective. In eval mode the layer is local and uses
/// the running statistics (without them, the statistics of this rank's batch, as BatchNorm does).
/// The gradients of weight and bias are this rank's part of the sum; DistributedDataParallel
/// averages them over the ranks. Options, parameters and buffers have the names and the meaning of
/// torch::nn::BatchNorm. If other collectives run during backward, as with DistributedDataParallel,
/// the layer needs a process group of its own (ProcessGroup::split); convert_sync_batch_norm()
/// makes one.
class SyncBatchNormImpl : public torch::nn::Module {
 public:
  SyncBatchNormImpl(torch::nn::BatchNormOptions options, ProcessGroup group);
  /// Shares the parameters and buffers of a torch::nn::BatchNorm1d, 2d or 3d.
  template <class BatchNorm>
  SyncBatchNormImpl(const BatchNorm& plain, ProcessGroup process_group, std::nullptr_t)
      : options(plain.options),
        weight(plain.weight),
        bias(plain.bias),
        running_mean(plain.running_mean),
        running_var(plain.running_var),
        num_batches_tracked(plain.num_batches_tracked),
        group_(std::move(process_group)) {
    register_tensors(weight.defined() && weight.requires_grad());
    train(plain.is_training());
  }

  /// Throws UsageError if the input is not [N, C, …], and in training mode if all ranks together
  /// have fewer than two values a channel.
  torch::Tensor forward(const torch::Tensor& input);
  void pretty_print(std::ostream& stream) const override;

  torch::nn::BatchNormOptions options;
  torch::Tensor weight, bias;               ///< [C]; undefined without affine.
  torch::Tensor running_mean, running_var;  ///< [C]; undefined without track_running_stats.
  torch::Tensor num_batches_tracked;        ///< []; undefined without track_running_stats.

 private:
  void register_tensors(bool trainable);

  ProcessGroup group_;
};
TORCH_MODULE(SyncBatchNorm);

/// Replaces each BatchNorm1d, 2d and 3d in `module` that is an element of a torch::nn::Sequential,
/// at any depth, by a SyncBatchNorm. Parameters and buffers stay the same tensors. Returns the
/// names of the converted layers. A C++ module that holds a layer as a member variable calls that
/// member, which cannot be replaced from outside. If there are such layers, UsageError names all of
/// them and nothing is changed: declare those members as tessera::SyncBatchNorm. Collective: splits
/// one sub-group off `group`.
std::vector<std::string> convert_sync_batch_norm(torch::nn::Module& module, ProcessGroup group);

}  // namespace tessera
#pragma GCC visibility pop
