// Parts beside the wrappers on a device; device_parity_test.cpp has the test.
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "device/parity.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/detail/device_generator.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/local_sgd.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/step/comm_hook.h"
#include "tessera/step/power_sgd.h"
#include "tessera/step/sync_batch_norm.h"

namespace tessera::on_device {
namespace {

using testing::Uneven;

Training with_hook(const std::function<CommHook()>& hook) {
  return [hook](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    DistributedDataParallelOptions options;
    options.comm_hook = hook();
    DistributedDataParallel ddp(net, group, options);
    torch::optim::SGD optimizer(net->parameters(), momentum());
    const double waits = train(ddp, optimizer, ddp, group, where, {}, [] {});
    return {on_cpu(net->parameters()), waits};
  };
}

CommHook power_sgd_with(PowerSgdOptions options) {
  options.start_iteration = 1;
  options.min_compression_rate = 1;
  return PowerSgd(options).hook();
}
CommHook power_sgd() { return power_sgd_with({}); }
CommHook power_sgd_from_guesses() { return power_sgd_with({.warm_start = false}); }

/// Uneven with dropout, whose layers are computed again in backward.
struct CheckpointedImpl : torch::nn::Module {
  explicit CheckpointedImpl(bool again_in_backward)
      : net(register_module("net", Uneven())), again(again_in_backward) {
    detail::set_device_generator(type(), [](at::Device place) { return generator(place.index()); });
  }
  at::Tensor part(const std::function<at::Tensor(const at::Tensor&)>& compute,
                  const at::Tensor& x) const {
    return again ? tessera::checkpoint(compute, x) : compute(x);
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = part(
        [this](const at::Tensor& in) {
          const auto hidden = torch::tanh(net->first(in)) * net->scale;
          return torch::tanh(net->second(torch::dropout(hidden, 0.5, true)));
        },
        x);
    return part([this](const at::Tensor& in) { return net->last(in); }, h);
  }
  Uneven net;
  bool again;
};
TORCH_MODULE(Checkpointed);

Checkpointed seeded_on(at::Device where, bool again) {
  auto net = model_on<Checkpointed>(where, again);
  torch::manual_seed(5);
  if (!where.is_cpu()) generator(where.index()).unsafeGetGeneratorImpl()->set_current_seed(5);
  return net;
}

Training ddp_with_dropout(bool again) {
  return [again](ProcessGroup group, at::Device where) -> Outcome {
    auto net = seeded_on(where, again);
    DistributedDataParallel ddp(net, group);
    torch::optim::SGD optimizer(net->parameters(), momentum());
    const double waits = train(ddp, optimizer, ddp, group, where, {}, [] {});
    return {on_cpu(net->parameters()), waits};
  };
}

Training fsdp_with_dropout(bool again) {
  return [again](ProcessGroup group, at::Device where) -> Outcome {
    auto net = seeded_on(where, again);
    FullyShardedDataParallel fsdp(net, group, by_layer());
    torch::optim::SGD optimizer(fsdp.parameters(), momentum());
    const double waits = train(fsdp, optimizer, fsdp, group, where, {}, [] {});
    return {whole_parameters(fsdp), waits};
  };
}

struct NormalizedImpl : torch::nn::Module {
  explicit NormalizedImpl(const ProcessGroup& group)
      : first(register_module("first", torch::nn::Linear(3, 5))),
        norm(register_module("norm", SyncBatchNorm(torch::nn::BatchNormOptions(5), group))),
        last(register_module("last", torch::nn::Linear(5, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first;
  SyncBatchNorm norm;
  torch::nn::Linear last;
};
TORCH_MODULE(Normalized);

Outcome sync_batch_norm(ProcessGroup group, at::Device where) {
  auto net = model_on<Normalized>(where, *group.split(0));
  DistributedDataParallel ddp(net, group);
  torch::optim::SGD optimizer(net->parameters(), momentum());
  const double waits = train(ddp, optimizer, ddp, group, where, {}, [] {});
  auto all = on_cpu(net->parameters());
  for (const auto& buffer : on_cpu(net->buffers())) all.push_back(buffer);
  return {all, waits};
}

/// Each rank is a group, and synchronises every two steps.
Training local_sgd(LocalSgdOptions options) {
  options.sync_every = 2;
  return [options](ProcessGroup group, at::Device where) -> Outcome {
    auto net = model_on(where);
    torch::optim::SGD optimizer(net->parameters(), momentum());
    LocalSgd local(group, parameter_shards(named_parameters(*net)), options);
    const auto batches = batches_of(kSteps, group.rank(), where);
    const double waits = waits_of_steps([&](int step) {
      optimizer.zero_grad();
      auto loss = net(batches[step]).square().mean();
      loss.backward();
      optimizer.step();
      local.step();
      return loss;
    });
    local.synchronize();
    return {on_cpu(net->parameters()), waits};
  };
}

const LocalSgdOptions kAverage{.outer = OuterOptimizer::average}, kNesterov{},
    kInBackground{.overlap = Overlap::background}, kInt8{.wire = OuterWire::int8};

// The simulated device waits for var_mean in a SyncBatchNorm, and for dropout, here of both runs.
// With libtorch 2 it also waits for the backward of dropout, which is an operator there.
constexpr int kDraws = 3;
constexpr double kLoss = 1, kFew = 2;
// The host encodes and decodes what it sends, in every second step.
constexpr double kEncoded = 3;
constexpr double kRounded = 1e-2, kExact = 1e-6;  // tolerances

INSTANTIATE_TEST_SUITE_P(
    Parts, DeviceParity,
    ::testing::Values(
        Case{"bf16_hook", with_hook(bf16_compress_hook), true, kFew, kWorlds, kRounded},
        Case{"fp16_hook", with_hook(fp16_compress_hook), true, kFew, kWorlds, kRounded},
        Case{"power_sgd_hook", with_hook(power_sgd), false, kFew, kWorlds, kRounded},
        Case{"power_sgd_without_warm_start_hook", with_hook(power_sgd_from_guesses), false, kFew,
             kWorlds, kRounded},
        Case{"checkpointed_ddp", ddp_with_dropout(true), true, kLoss + kDraws, kWorlds, kExact,
             ddp_with_dropout(false)},
        Case{"checkpointed_fsdp", fsdp_with_dropout(true), true, kLoss + kDraws, kWorlds, kExact,
             fsdp_with_dropout(false)},
        Case{"sync_batch_norm", sync_batch_norm}, Case{"local_sgd_average", local_sgd(kAverage)},
        Case{"local_sgd_nesterov", local_sgd(kNesterov)},
        Case{"local_sgd_in_background", local_sgd(kInBackground)},
        Case{"local_sgd_int8", local_sgd(kInt8), true, kEncoded, kWorlds, kRounded}),
    name_of_case);

}  // namespace
}  // namespace tessera::on_device
