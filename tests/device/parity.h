#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "device/batch.h"
#include "device/seeds.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "harness/models.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace tessera::on_device {

inline constexpr int kSteps = 4;
inline const std::vector<int> kWorlds{1, 2, 3};

/// What a training gives.
struct Outcome {
  std::vector<at::Tensor> parameters;
  double waits_a_step = 0;  ///< Of the host.
};
using Training = std::function<Outcome(ProcessGroup, at::Device)>;

struct Variant {
  bool accumulate = false;  ///< Two backwards a step, the first one under no_sync().
  bool clip = false;
  bool twice = false;      ///< Two backwards a step that reduce.
  bool reads_norm = true;  ///< After clipping.
};

/// A training that gives the same on the device as on the CPU.
struct Case {
  const char* name;
  Training train;
  /// A norm is added up by another kernel on the simulated device than on the CPU.
  bool same_bits = true;
  double waits = 2;  ///< Of the host, at most in a step: the loss, and a norm.
  std::vector<int> worlds = kWorlds;
  double tolerance = 1e-4;  ///< Where the kernels are not those of the CPU.
  /// Where they draw other random numbers than those of the CPU: the same training on the device
  /// without the part that is tested.
  Training plain = nullptr;
};
inline void PrintTo(const Case& test_case, std::ostream* out) {
  *out << "at most " << test_case.waits << " waits a step";
}

inline at::Device own_device(const Groups& groups) { return device(groups.rank()); }

template <class Net = testing::Uneven, class... Args>
Net model_on(at::Device where, Args&&... args) {
  torch::manual_seed(1);
  Net net(std::forward<Args>(args)...);
  net->to(where);
  return net;
}

inline torch::optim::SGDOptions momentum() { return torch::optim::SGDOptions(0.1).momentum(0.9); }

inline std::vector<at::Tensor> on_cpu(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().cpu());
  return result;
}

inline FullyShardedDataParallelOptions by_layer() {
  FullyShardedDataParallelOptions options;
  options.wrap_policy = wrap_by_type<torch::nn::LinearImpl>();
  return options;
}

inline std::vector<at::Tensor> whole_parameters(FullyShardedDataParallelBase& fsdp) {
  std::vector<at::Tensor> result;
  for (const auto& [name, tensor] : fsdp.state_dict(-1)) result.push_back(tensor.cpu());
  return result;
}

/// Calls `step` kSteps times and reads the loss that it returns. Returns the host's waits of a
/// step, without the first one, which allocates.
inline double waits_of_steps(const std::function<at::Tensor(int)>& step) {
  for (int i = 0; i < kSteps; ++i) {
    if (i == 1) reset_stats();
    step(i).item<float>();
  }
  return static_cast<double>(stats().host_waits) / (kSteps - 1);
}

/// Trains on batches of this rank's own.
template <class Model, class Optimizer, class Wrapper>
double train(Model& model, Optimizer& optimizer, Wrapper& wrapper, const ProcessGroup& group,
             at::Device where, Variant variant, const std::function<void()>& clip) {
  const auto batches = batches_of(2 * kSteps, group.rank(), where);
  const auto loss_of = [&](int i) { return (model(batches[i]) - 0.5).square().mean(); };
  return waits_of_steps([&](int step) {
    optimizer.zero_grad();
    if (variant.accumulate) {
      const auto scope = wrapper.no_sync();
      loss_of(kSteps + step).backward();
    }
    if (variant.twice) loss_of(kSteps + step).backward();
    auto loss = loss_of(step);
    loss.backward();
    if (variant.clip) clip();
    optimizer.step();
    return loss;
  });
}

inline void expect_close(const at::Tensor& host, const at::Tensor& there, bool same_bits,
                         const std::string& what, double tolerance = 1e-4) {
  if (has_kernels_of_cpu()) tolerance = 1e-6;
  const bool good = same_bits && has_kernels_of_cpu()
                        ? host.equal(there)
                        : host.allclose(there, tolerance, tolerance / 10);
  expect(good, "the values of " + what + ": they differ by at most " +
                   std::to_string((host - there).abs().max().item<double>()));
}

inline void compare(const std::vector<at::Tensor>& host, const std::vector<at::Tensor>& there,
                    const Case& test_case) {
  expect(!host.empty() && host.size() == there.size(), "equally many parameters");
  for (size_t i = 0; i < host.size(); ++i) {
    expect_close(host[i], there[i], test_case.same_bits, "parameter " + std::to_string(i),
                 test_case.tolerance);
  }
}

/// One rank's part: the case on the CPU and on the device, with checks also where that has no
/// backend.
inline void expect_parity_of_rank(const Case& test_case, Groups& groups, bool checks) {
  ProcessGroupOptions options;
  options.check_collectives = checks;
  const c10::DeviceGuard own(own_device(groups));
  const auto host = test_case.plain && !has_kernels_of_cpu()
                        ? test_case.plain(groups.device(options), own_device(groups))
                        : test_case.train(groups.cpu(options), at::kCPU);
  if (checks) {
    const auto staged = test_case.train(groups.staged(options), own_device(groups));
    compare(host.parameters, staged.parameters, test_case);
  }
  // Two ranks' sums have one order.
  if (checks && has_kernels_of_cpu() && groups.size() > 2) {
    const auto native = test_case.train(groups.native(options), own_device(groups));
    constexpr double kUsual = 1e-4, kSumsAlone = 1e-6;
    const double most = test_case.tolerance > kUsual ? test_case.tolerance : kSumsAlone;
    for (size_t i = 0; i < host.parameters.size(); ++i)
      expect(host.parameters[i].allclose(native.parameters[i], most, most / 10),
             "with sums by the backend, the values of parameter " + std::to_string(i));
  }
  const auto there = test_case.train(groups.device(options), own_device(groups));
  std::string reasons;
  for (const auto& reason : stats().wait_reasons) reasons += " " + reason;
  compare(host.parameters, there.parameters, test_case);
  expect(there.waits_a_step <= test_case.waits,
         "at most " + std::to_string(test_case.waits) + " waits a step, not " +
             std::to_string(there.waits_a_step) + ":" + reasons);
}

/// Runs the case in each of its worlds, by turns with and without checks; both with one seed where
/// no delays are simulated. One rank alone has one seed.
inline void expect_parity(const Case& test_case) {
  for (const int world : test_case.worlds) {
    if (world > most_ranks()) continue;
    int turn = 0;
    for (const int seed : seeds(2)) {
      if (world == 1 && turn > 0) break;
      const bool checks_first = turn++ % 2 == 0;
      for (const bool checks : {checks_first, !checks_first}) {
        if (checks != checks_first && has_kernels_of_cpu()) continue;
        const auto errors = run_processes(
            world, seed, [&](Groups& groups) { expect_parity_of_rank(test_case, groups, checks); });
        EXPECT_THAT(errors, ::testing::Each(""))
            << world << " ranks, seed " << seed << (checks ? ", checks" : "");
      }
    }
  }
}

class DeviceParity : public ::testing::TestWithParam<Case> {};

inline std::string name_of_case(const ::testing::TestParamInfo<Case>& test_case) {
  return test_case.param.name;
}

}  // namespace tessera::on_device
