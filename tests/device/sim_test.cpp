// The simulated device itself: it computes as the CPU does, and it makes mistakes visible.
#include "harness/sim/sim.h"

#include <thread>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adamw.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "harness/device/rank_processes.h"
#include "harness/sim/device_backend.h"

namespace tessera::sim {
namespace {

using on_device::expect, on_device::run_processes, on_device::Groups;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void expect_sound(const std::function<void()>& body) {
  on_device::expect_success(1, [&](Groups&) { body(); });
}

c10::Stream side_stream() {
  return c10::impl::VirtualGuardImpl(kType).getStreamFromGlobalPool(device(), false);
}

void order(const c10::Stream& before, const c10::Stream& after) {
  c10::Event event(kType);
  event.record(before);
  event.block(after);
}

TEST(SimulatedDevice, ComputesAsTheCpu) {
  expect_sound([] {
    const auto x = torch::randn({20, 20}), y = x.to(device());
    expect(y.cpu().equal(x), "a copy there and back");
    expect((y * 2 + y.t()).cpu().equal(x * 2 + x.t()), "arithmetic and views");
    expect(y.sum().item<float>() == x.sum().item<float>(), "a sum");
    expect(y.nonzero().cpu().equal(x.nonzero()), "a result whose shape depends on the data");
    expect(torch::cat({y, y}).cpu().equal(torch::cat({x, x})), "a list of tensors");
    expect(y.narrow(0, 5, 10).select(1, 3).cpu().equal(x.narrow(0, 5, 10).select(1, 3)), "views");
    const auto other = torch::ones({3}, device(2));
    expect((other + 1).device() == device(2), "another device");
  });
}

/// The parameters after a few steps.
std::vector<at::Tensor> trained(at::Device where) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(6, 8),
                            torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})),
                            torch::nn::Tanh(), torch::nn::Linear(8, 3));
  net->to(where);
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    net->forward(torch::randn({4, 6}).to(where)).square().mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> result;
  for (const auto& parameter : net->parameters()) result.push_back(parameter.detach().cpu());
  return result;
}

TEST(SimulatedDevice, TrainsToTheBitsOfTheCpu) {
  expect_sound([] {
    const auto host = trained(at::kCPU), there = trained(device(1));
    for (size_t i = 0; i < host.size(); ++i)
      expect(host[i].equal(there[i]), "equal parameter " + std::to_string(i));
  });
}

TEST(SimulatedDevice, HostAccessEndsTheTestWithAText) {
  const auto errors = run_processes(1, 1, [](Groups&) {
    const auto x = torch::ones({3}, device());
    volatile const float value = *static_cast<const float*>(x.data_ptr());
    (void)value;
  });
  EXPECT_THAT(errors, ElementsAre(HasSubstr("sim: the host touched memory of the device")));
}

TEST(SimulatedDevice, AMissingStreamWaitIsVisible) {
  for (const bool wait : {true, false}) {
    int wrong_seeds = 0;
    for (int seed = 1; seed <= 3; ++seed) {
      const auto errors = run_processes(1, seed, [&](Groups&) {
        const auto side = side_stream();
        for (int i = 0; i < 20; ++i) {
          const auto x = torch::full({64}, static_cast<float>(i), device()) + 1;
          if (wait) order(current_stream(), side);
          at::Tensor y;
          {
            const c10::StreamGuard there(side);
            y = x * 2;
          }
          order(side, current_stream());
          expect(y.cpu()[0].item<float>() == 2.f * (i + 1), "the product");
        }
      });
      wrong_seeds += !errors[0].empty();
    }
    EXPECT_EQ(wrong_seeds, wait ? 0 : 3);
  }
}

TEST(SimulatedDevice, MemoryWithoutRecordStreamIsReusedTooEarly) {
  for (const bool record : {true, false}) {
    const auto errors = run_processes(1, 1, [&](Groups&) {
      const auto side = side_stream();
      for (int i = 0; i < 20; ++i) {
        at::Tensor y;
        {
          auto x = torch::full({256}, static_cast<float>(i), device());
          order(current_stream(), side);
          const c10::StreamGuard there(side);
          auto busy = torch::ones({64}, device());
          for (int k = 0; k < 4; ++k) busy = busy * 1.0;
          y = x * 2;
          if (record) x.record_stream(side);
        }
        const auto other = torch::full({256}, -1.f, device());
        synchronize();
        expect(y.cpu()[0].item<float>() == 2.f * i, "the product");
      }
    });
    EXPECT_EQ(errors[0].empty(), record) << errors[0];
  }
}

TEST(SimulatedDevice, HostWaitsAreCounted) {
  expect_sound([] {
    const auto host = pinned_empty(100).fill_(1);
    auto x = torch::empty({100}, device());
    reset_stats();
    x.copy_(host, true);
    for (int i = 0; i < 10; ++i) x = x * 2 + 1;
    expect(stats().host_waits == 0, "no wait for kernels and copies from pinned memory");
    x.sum().item<float>();
    expect(stats().host_waits == 1, "a wait for an item");
    expect(stats().kernels >= 10 && stats().reused > 0, "kernels and reused memory");
  });
}

TEST(SimulatedDevice, TheHostWaitsForCopiesOfOtherThanPinnedBytes) {
  expect_sound([] {
    const auto waits_of = [](const std::function<void()>& copy) {
      reset_stats();
      copy();
      return stats().host_waits;
    };
    auto host = torch::ones({6, 4}), pinned = pinned_empty(24).fill_(1).view({6, 4});
    auto x = torch::empty({6, 4}, device()), doubles = x.to(at::kDouble);
    expect(waits_of([&] { x.copy_(host); }) == 1, "from pageable memory");
    expect(waits_of([&] { x.copy_(host, true); }) == 1, "from pageable memory, not blocking");
    expect(waits_of([&] { doubles.copy_(pinned, true); }) == 1, "another dtype");
    expect(waits_of([&] { x.t().copy_(pinned.view({4, 6}), true); }) == 1, "other strides");
    expect(waits_of([&] { pinned.copy_(doubles, true); }) == 1, "another dtype to the CPU");
    expect(waits_of([&] { pinned.copy_(x); }) == 1, "blocking");
    expect(waits_of([&] { x.t().copy_(pinned.t(), true); }) == 0, "the same strides");
    expect(waits_of([&] { x.narrow(0, 0, 0).copy_(host.narrow(0, 0, 0)); }) == 0, "no elements");
    expect(waits_of([&] { x.nonzero(); }) == 1, "a result whose shape depends on the data");
    x.copy_(host.fill_(7));
    host.fill_(8);
    expect(x.cpu().eq(7).all().item<bool>(), "the values that the copy has waited for");
  });
}

TEST(SimulatedDevice, AProcessWhoseDeviceCannotBeFreedEnds) {
  const auto text = on_device::after_loss(SIGKILL, [](Groups& groups, ProcessGroupOptions options) {
    return groups.with(device_backend(/*exclusive=*/false, /*can_abort=*/false), options);
  });
  EXPECT_THAT(text, HasSubstr("rank 1 has not run for 3000 ms"));
  EXPECT_THAT(text, HasSubstr("so this process ends"));
}

/// Which collectives the backend runs for one of ours, and the kernels beside them.
TEST(SimulatedDevice, ASumOfTheBackendIsOneCollectiveAndNoKernel) {
  on_device::expect_success(3, [](Groups& groups) {
    for (const bool deterministic : {false, true}) {
      ProcessGroupOptions options;
      options.deterministic = deterministic;
      auto group = groups.native(options);
      const auto x = torch::rand({60}, at::TensorOptions(device())), sum = x.clone();
      group.all_reduce(sum);  // connects
      const auto count = [&](const char* what, uint64_t calls, uint64_t kernels,
                             const std::function<void()>& collective) {
        on_device::reset_stats();
        const auto before = backend_calls();
        collective();
        const auto made = backend_calls() - before;
        expect(made == calls && on_device::stats().kernels == kernels,
               std::string(what) + ": " + std::to_string(made) + " calls, " +
                   std::to_string(on_device::stats().kernels) + " kernels");
        expect(on_device::stats().host_waits == 0, "no wait");
      };
      auto into = x.narrow(0, 0, 20).clone();
      count("all_reduce", deterministic ? 2 : 1, deterministic ? 3 : 0,
            [&] { group.all_reduce(sum, 1.0 / 3); });
      count("reduce_scatter", 1, deterministic ? 3 : 0, [&] {
        group.reduce_scatter_into_async(x, {20, 20, 20}, into, 1.0 / 3).wait();
      });
      count("all_gather", 1, 0, [&] { group.all_gather(x, {20, 20, 20}); });
      count("uneven all_gather", 3, 0, [&] { group.all_gather(x, {20, 30, 10}); });
    }
  });
}

/// Otherwise tests of the order of sums could not fail.
TEST(SimulatedDevice, ItsBackendAddsInAnotherOrderThanTheCpu) {
  on_device::expect_success(3, [](Groups& groups) {
    torch::manual_seed(groups.rank());
    const auto x = torch::rand({1000}), y = x.to(device());
    auto cpu = groups.cpu(), native = groups.native();
    cpu.all_reduce(x);
    native.all_reduce(y);
    expect(!y.cpu().equal(x) && y.cpu().allclose(x, 1e-6), "other bits");
  });
}

}  // namespace
}  // namespace tessera::sim
