// State that goes from a device to the CPU and back, and ranks with unequal data.
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "device/parity.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "harness/models.h"
#include "tessera/distributed_data_parallel.h"
#include "tessera/fully_sharded_data_parallel.h"
#include "tessera/join.h"
#include "tessera/optim.h"
#include "tessera/zero_redundancy_optimizer.h"

namespace tessera::on_device {
namespace {

using testing::Uneven;

void expect_in_place(int world, const std::function<void(Groups&)>& body, int usual = 3) {
  expect_success(
      world,
      [&](Groups& groups) {
        const c10::DeviceGuard own(device(groups.rank()));
        body(groups);
      },
      usual);
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  expect(!a.empty() && a.size() == b.size(), "equally many parameters");
  for (size_t i = 0; i < a.size(); ++i) expect_close(a[i].cpu(), b[i].cpu(), true, i);
}

/// A model of FullyShardedDataParallel and its optimizer on one device.
struct Sharded {
  Sharded(ProcessGroup group, at::Device place, bool cpu_offload = false)
      : net(on(place)),
        fsdp(net, group, options(cpu_offload)),
        optimizer(fsdp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)),
        rank(group.rank()),
        device(place) {}

  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      optimizer.zero_grad();
      fsdp(batch(step, rank, device)).square().mean().backward();
      optimizer.step();
    }
  }
  void take_from(Sharded& other) {
    fsdp.load_state_dict(other.fsdp.state_dict(-1));
    fsdp.load_optim_state_dict(optimizer, other.fsdp.optim_state_dict(other.optimizer, -1));
  }
  std::vector<at::Tensor> parameters() {
    std::vector<at::Tensor> result;
    for (const auto& [name, tensor] : fsdp.state_dict(-1)) result.push_back(tensor);
    return result;
  }

  static Uneven on(at::Device where) {
    torch::manual_seed(1);
    Uneven net;
    net->to(where);
    return net;
  }
  static FullyShardedDataParallelOptions options(bool cpu_offload) {
    FullyShardedDataParallelOptions result;
    result.cpu_offload = cpu_offload;
    result.wrap_policy = wrap_by_type<torch::nn::LinearImpl>();
    return result;
  }

  Uneven net;
  FullyShardedDataParallel<Uneven> fsdp;
  torch::optim::SGD optimizer;
  int rank;
  at::Device device;
};

TEST(DeviceState, FsdpGoesFromDeviceToCpuAndBack) {
  expect_in_place(2, [](Groups& groups) {
    const auto here = device(groups.rank());
    auto cpu = groups.cpu(), there = groups.device();
    Sharded whole(there, here), first(there, here), second(cpu, at::kCPU), third(there, here);
    whole.train(0, 6);
    first.train(0, 2);
    second.take_from(first);
    second.train(2, 4);
    third.take_from(second);
    third.train(4, 6);
    expect_equal(whole.parameters(), third.parameters());
  });
}

/// What the model gives between each backward and the optimizer's step, at last read on the CPU.
std::vector<at::Tensor> outputs_before_steps(Sharded& sharded) {
  std::vector<at::Tensor> outputs;
  for (int step = 0; step < 5; ++step) {
    sharded.optimizer.zero_grad();
    sharded.fsdp(batch(step, sharded.rank, sharded.device)).square().mean().backward();
    const auto x = batch(step + 1, sharded.rank, sharded.device);
    if (!sharded.device.is_cpu()) keep_busy(100);
    const at::NoGradGuard no_grad;
    const auto output = sharded.fsdp(x);
    sharded.optimizer.step();
    outputs.push_back(output.cpu());
  }
  return outputs;
}

TEST(DeviceState, TheOptimizerOnTheHostWaitsUntilTheDeviceHasReadTheShards) {
  for (const int world : {1, 2}) {
    expect_in_place(
        world,
        [](Groups& groups) {
          Sharded host(groups.cpu(), at::kCPU);
          Sharded there(groups.device(), device(groups.rank()), /*cpu_offload=*/true);
          expect_equal(outputs_before_steps(host), outputs_before_steps(there));
        },
        5);
  }
}

std::vector<at::Tensor> train_uneven(ProcessGroup group, at::Device where) {
  auto net = Sharded::on(where);
  DistributedDataParallel ddp(net, group);
  ZeroRedundancyOptimizerOptions options;
  options.reduce_gradients = false;
  ZeroRedundancyOptimizer optimizer(
      *net, group,
      optimizer_factory<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)), options);
  join({ddp, optimizer}, {}, [&](JoinLoop& iteration) {
    for (int step = 0; step < 2 + 2 * group.rank(); ++step) {
      iteration.next();
      optimizer.zero_grad();
      ddp(batch(step, group.rank(), where)).square().mean().backward();
      optimizer.step();
    }
  });
  return net->parameters();
}

TEST(DeviceState, JoinOfUnequalDataHasTheBitsOfTheCpu) {
  expect_in_place(2, [](Groups& groups) {
    const auto host = train_uneven(groups.cpu(), at::kCPU);
    expect_equal(host, train_uneven(groups.device(), device(groups.rank())));
  });
}

}  // namespace
}  // namespace tessera::on_device
