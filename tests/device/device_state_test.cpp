// State that goes from a device to the CPU and back.
#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "device/wrapped.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"

namespace tessera::on_device {

struct StateCase {
  const char* name;
  MakeWrapped make;
  double tolerance = 1e-4;  ///< Where the kernels are not those of the CPU.
};
inline void PrintTo(const StateCase& test_case, std::ostream* out) { *out << test_case.name; }

class DeviceStateOf : public ::testing::TestWithParam<StateCase> {};

namespace {

void expect_in_place(int world, const std::function<void(Groups&)>& body, int usual = 3) {
  expect_success(
      world,
      [&](Groups& groups) {
        const c10::DeviceGuard own(device(groups.rank()));
        body(groups);
      },
      usual);
}

/// Steps [from, to) on batches of this rank's own.
void train_steps(Wrapped& model, int rank, at::Device where, int from, int to) {
  for (int step = from; step < to; ++step) model.step(batch(step, rank, where));
}

void expect_same_state(const State& a, const State& b, double tolerance) {
  const auto all = a.tensors(), others = b.tensors();
  expect(!all.empty() && all.size() == others.size(), "equally many tensors");
  for (const auto& [name, tensor] : all) {
    expect(others.count(name) > 0, name);
    expect_close(tensor.cpu(), others.at(name).cpu(), true, name, tolerance);
  }
}

/// Where the documentation says so.
State expect_on_the_cpu(State state) {
  for (const auto& [name, tensor] : state.on_the_cpu())
    expect(tensor.is_cpu(), name + " on the CPU");
  return state;
}

TEST_P(DeviceStateOf, GoesFromDeviceToCpuAndBack) {
  const auto& [name, make, tolerance] = GetParam();
  for (const int world : kWorlds) {
    if (world > most_ranks()) continue;
    expect_in_place(
        world,
        [&, &make = make, &tolerance = tolerance](Groups& groups) {
          const int rank = groups.rank();
          const auto here = device(rank);
          const auto cpu = groups.cpu(), there = groups.device();
          const auto whole = make(there, here), first = make(there, here),
                     second = make(cpu, at::kCPU), third = make(there, here);
          train_steps(*whole, rank, here, 0, 6);
          train_steps(*first, rank, here, 0, 2);
          second->load(expect_on_the_cpu(first->state()));
          train_steps(*second, rank, at::kCPU, 2, 4);
          third->load(expect_on_the_cpu(second->state()));
          train_steps(*third, rank, here, 4, 6);
          expect_same_state(expect_on_the_cpu(whole->state()), third->state(), tolerance);
        },
        2);
  }
}

constexpr double kOfInt8 = 1e-2;  // tolerance

INSTANTIATE_TEST_SUITE_P(
    Wrappers, DeviceStateOf,
    ::testing::Values(
        StateCase{"ddp", wrapped<InDdp>()}, StateCase{"zero", wrapped<InZero>()},
        StateCase{"zero_shard_gradients", wrapped<InZero>(ZeroOptions{.shard_gradients = true})},
        StateCase{"zero_slices", wrapped<InZeroBySlices>()},
        StateCase{"zero_archive", wrapped<InZeroByArchive>()},
        StateCase{"distributed_optimizer", wrapped<InDistributedOptimizer>(means())},
        StateCase{"fsdp", wrapped<InFsdp>()}, StateCase{"fsdp_slices", wrapped<InFsdpBySlices>()},
        StateCase{"fsdp_cpu_offload", wrapped<InFsdp>(true)},
        StateCase{"local_sgd", wrapped<InLocalSgd>(LocalSgdOptions{})},
        StateCase{"local_sgd_in_background",
                  wrapped<InLocalSgd>(LocalSgdOptions{.overlap = Overlap::background})},
        StateCase{"local_sgd_int8", wrapped<InLocalSgd>(LocalSgdOptions{.wire = OuterWire::int8}),
                  kOfInt8}),
    [](const auto& tested) { return std::string(tested.param.name); });

/// What the model gives between each backward and the optimizer's step, at last read on the CPU.
std::vector<at::Tensor> outputs_before_steps(InFsdp& model, int rank, at::Device where,
                                             bool gradients) {
  std::vector<at::Tensor> outputs;
  for (int step = 0; step < 5; ++step) {
    model.backward(batch(step, rank, where));
    const auto x = batch(step + 1, rank, where);
    if (!where.is_cpu()) keep_busy(100);
    const at::AutoGradMode mode(gradients);
    const auto output = model.fsdp(x).detach();
    model.optimizer.step();
    outputs.push_back(output.cpu());
  }
  return outputs;
}

TEST(DeviceState, TheOptimizerOnTheHostWaitsUntilTheDeviceHasReadTheShards) {
  for (const auto& [world, gradients] : {std::pair(1, false), {2, false}, {1, true}, {2, true}}) {
    expect_in_place(
        world,
        [gradients = gradients](Groups& groups) {
          const int rank = groups.rank();
          InFsdp host(groups.cpu(), at::kCPU);
          InFsdp there(groups.device(), device(rank), /*cpu_offload=*/true);
          const auto expected = outputs_before_steps(host, rank, at::kCPU, gradients);
          const auto got = outputs_before_steps(there, rank, device(rank), gradients);
          for (size_t i = 0; i < expected.size(); ++i)
            expect_close(expected[i], got[i], true, "step " + std::to_string(i));
        },
        5);
  }
}

TEST(DeviceZero, OptionsThatNeedTheCpuAreErrors) {
  expect_success(2, [](Groups& groups) {
    const auto text = error_of([&] {
      InZero(groups.device(), own_device(groups), ZeroOptions{.share_parameters = true});
    });
    expect_contains(text, "ZeroRedundancyOptimizer");
    expect_contains(text, "option share_parameters needs parameters on the CPU");
  });
}

}  // namespace
}  // namespace tessera::on_device
