// FullyShardedDataParallel that puts a model of the CPU on a device, unit by unit.
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/sgd.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "device/parity.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/memory/deferred_init.h"

namespace tessera::on_device {
namespace {

constexpr int kWide = 160;  // a weight of more than 64 KiB, which is deferred

/// With a buffer, a frozen parameter and a bias without a gradient.
struct WideImpl : torch::nn::Module {
  WideImpl()
      : first(register_module("first", torch::nn::Linear(3, kWide))),
        second(register_module("second", torch::nn::Linear(kWide, kWide))),
        last(register_module("last", torch::nn::Linear(kWide, 2))),
        mean(register_buffer("mean", torch::full({3}, 0.25))) {
    first->bias.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    return last(torch::tanh(second(torch::tanh(first(x - mean)))));
  }
  torch::nn::Linear first, second, last;
  at::Tensor mean;
};
TORCH_MODULE(Wide);

/// The weights before and after a few steps.
std::vector<at::Tensor> trained(Wide net, const ProcessGroup& group,
                                const FullyShardedDataParallelOptions& options) {
  const auto where = device(group.rank());
  FullyShardedDataParallel fsdp(net, group, options);
  auto all = whole_parameters(fsdp);
  expect(net->mean.device() == where, "the buffer on the device");
  torch::optim::SGD optimizer(fsdp.parameters(), momentum());
  for (const auto& x : batches_of(3, group.rank(), where)) {
    optimizer.zero_grad();
    fsdp(x).square().mean().backward();
    optimizer.step();
  }
  for (auto& tensor : whole_parameters(fsdp)) all.push_back(std::move(tensor));
  return all;
}

TEST(DeviceDeferred, HasTheBitsOfAModelThatWasMoved) {
  for (const int world : {1, 2, 3}) {
    if (world > most_ranks()) continue;
    expect_success(
        world,
        [](Groups& groups) {
          const auto where = device(groups.rank());
          const c10::DeviceGuard own(where);
          auto group = groups.device();
          for (const bool offload : {false, true}) {
            for (const bool whole : {false, true}) {
              auto options = by_layer();
              options.cpu_offload = offload;
              if (whole) options.sharding_strategy = ShardingStrategy::no_shard;
              const auto expected = trained(model_on<Wide>(where), group, options);
              // Only rank 0's values are computed. Without a number it is the current device.
              options.device = groups.rank() == 0 ? where : at::Device(where.type());
              torch::manual_seed(1);
              const auto deferred = trained(deferred_init([] { return Wide(); }), group, options);
              torch::manual_seed(1);
              const auto eager = trained(Wide(), group, options);
              expect(expected.size() == deferred.size(), "as many tensors");
              for (size_t i = 0; i < expected.size(); ++i) {
                expect(deferred[i].equal(expected[i]), "deferred, tensor " + std::to_string(i));
                expect(eager[i].equal(expected[i]), "eager, tensor " + std::to_string(i));
              }
            }
          }
        },
        1);
  }
}

TEST(DeviceDeferred, ADeviceThatARankCannotUseIsAnErrorOnAll) {
  expect_success(
      2,
      [](Groups& groups) {
        const auto where = device(groups.rank());
        const c10::DeviceGuard own(where);
        const auto error_with = [&](const ProcessGroup& group, at::Device wanted) {
          auto options = by_layer();
          options.device = wanted;
          return error_of([&] { FullyShardedDataParallel fsdp(Wide(), group, options); });
        };
        const auto name = where.str();
        expect_contains(error_with(groups.cpu(), where),
                        "FullyShardedDataParallel: rank 0: option device is " + device(0).str() +
                            ", and the group does not move its tensors; expected a group of "
                            "with_device()");
        auto group = groups.device();
        const at::Device absent(where.type(), 100);
        expect_contains(error_with(group, groups.rank() == 1 ? absent : where),
                        "rank 1: option device is " + absent.str() + ", and this process sees ");
        expect_contains(error_with(group, at::Device(at::kXPU)),
                        "option device is xpu, and this process sees no such device");
      },
      1);
}

}  // namespace
}  // namespace tessera::on_device
