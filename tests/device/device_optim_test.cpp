// Fused optimizers on a device: the values of libtorch's, in a few launches for all parameters.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "device/expect_success.h"
#include "harness/device/device.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/optim/master_weights.h"

namespace tessera::on_device {
namespace {

using Tensors = std::vector<at::Tensor>;
using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(Tensors)>;

Tensors parameters(int count, at::ScalarType dtype) {
  Tensors result;
  for (int i = 0; i < count; ++i) {
    const auto values = (torch::arange(3 + i, at::kFloat) * 0.37 + i).cos();
    result.push_back(values.to(dtype).to(device()).requires_grad_());
  }
  return result;
}

void set_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto values = (torch::arange(parameters[i].numel(), at::kFloat) + step).sin();
    parameters[i].mutable_grad() = values.to(parameters[i].scalar_type()).to(device());
  }
}

/// Launches of each step.
std::vector<uint64_t> train(const Make& make, const Tensors& tensors) {
  const auto optimizer = make(tensors);
  std::vector<uint64_t> launches;
  for (int step = 0; step < 4; ++step) {
    set_gradients(tensors, step);
    // A parameter that takes no part in a step has its own step count from then on.
    if (step == 1) tensors[0].mutable_grad() = at::Tensor();
    reset_stats();
    optimizer->step();
    launches.push_back(stats().kernels);
    const auto waits = stats().wait_reasons;
    expect(stats().host_waits == 0,
           "no wait of the host" + (waits.empty() ? "" : " for " + *waits.begin()));
  }
  return launches;
}

template <class Fused, class Plain, class Options>
void expect_parity(const std::string& what, const Options& options, uint64_t most_launches) {
  const Make fused = [&](Tensors t) { return std::make_unique<Fused>(std::move(t), options); };
  const Make plain = [&](Tensors t) { return std::make_unique<Plain>(std::move(t), options); };
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    const auto few = parameters(3, dtype), many = parameters(12, dtype),
               expected = parameters(12, dtype);
    const auto launches_of_few = train(fused, few), launches = train(fused, many);
    train(plain, expected);
    for (size_t i = 0; i < many.size(); ++i) {
      expect(many[i]
                 .detach()
                 .cpu()
                 .to(at::kFloat)
                 .allclose(expected[i].detach().cpu().to(at::kFloat),
                           dtype == at::kFloat ? 1e-5 : 2e-2, dtype == at::kFloat ? 1e-6 : 1e-2),
             what + ": parameter " + std::to_string(i));
    }
    expect(launches[3] == launches_of_few[3],
           what + ": as many launches for 12 parameters as for 3");
    expect(launches[3] <= most_launches, what + ": at most " + std::to_string(most_launches) +
                                             " launches, not " + std::to_string(launches[3]));
  }
}

TEST(DeviceOptim, SgdUpdatesAllParametersTogether) {
  expect_success(1, [](Groups&) {
    using Options = torch::optim::SGDOptions;
    const auto parity = expect_parity<FusedSGD, torch::optim::SGD, Options>;
    parity("plain", Options(0.1), 1);
    parity("momentum", Options(0.1).momentum(0.9), 3);
    parity("dampening", Options(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1), 6);
    parity("nesterov", Options(0.1).momentum(0.9).nesterov(true), 6);
    parity("nesterov, decay", Options(0.1).momentum(0.9).nesterov(true).weight_decay(0.1), 7);
  });
}

TEST(DeviceOptim, AdamUpdatesAllParametersTogether) {
  expect_success(1, [](Groups&) {
    using Options = torch::optim::AdamOptions;
    const auto parity = expect_parity<FusedAdam, torch::optim::Adam, Options>;
    constexpr uint64_t kLists = 2;  // one parameter has left out a step
    parity("plain", Options(0.1), 10 * kLists);
    parity("decay", Options(0.1).weight_decay(0.1), 13 * kLists);
  });
}

TEST(DeviceOptim, AdamWUpdatesAllParametersTogether) {
  expect_success(1, [](Groups&) {
    using Options = torch::optim::AdamWOptions;
    expect_parity<FusedAdamW, torch::optim::AdamW, Options>("decay", Options(0.1).weight_decay(0.1),
                                                            11 * 2);
  });
}

TEST(DeviceOptim, MasterWeightsAreConvertedAndUpdatedTogether) {
  expect_success(1, [](Groups&) {
    const auto factory = optimizer_factory<FusedAdamW>(torch::optim::AdamWOptions(0.1));
    const Make masters = [&](Tensors t) {
      return with_master_weights(factory)({torch::optim::OptimizerParamGroup(std::move(t))});
    };
    const Make plain = [&](Tensors t) {
      return factory({torch::optim::OptimizerParamGroup(std::move(t))});
    };
    const auto few = parameters(3, at::kBFloat16), many = parameters(12, at::kBFloat16);
    const auto launches = train(masters, many)[3],
               without = train(plain, parameters(12, at::kFloat))[3];
    expect(train(masters, few)[3] == launches, "as many launches for 12 parameters as for 3");
    expect(launches <= without + 14,
           "at most 14 launches more, not " + std::to_string(launches - without));

    // The values of the CPU, which converts parameter by parameter.
    const auto expected = parameters(12, at::kBFloat16);
    Tensors on_host;
    for (const auto& each : expected) on_host.push_back(each.detach().cpu().requires_grad_());
    const auto there = masters(expected), here = masters(on_host);
    for (int step = 0; step < 4; ++step) {
      set_gradients(expected, step);
      for (size_t i = 0; i < on_host.size(); ++i) {
        if (step == 2) {  // what a program writes counts
          const at::NoGradGuard no_grad;
          expected[i].fill_(2);
          on_host[i].fill_(2);
        }
        on_host[i].mutable_grad() = expected[i].grad().cpu();
      }
      there->step();
      here->step();
      for (size_t i = 0; i < on_host.size(); ++i)
        expect(expected[i]
                   .detach()
                   .cpu()
                   .to(at::kFloat)
                   .allclose(on_host[i].detach().to(at::kFloat), 1e-2, 1e-3),
               "step " + std::to_string(step) + ": parameter " + std::to_string(i));
    }
  });
}

}  // namespace
}  // namespace tessera::on_device
