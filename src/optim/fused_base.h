#pragma once

#include <string>

#include "optim/kernels.h"
#include "optim/torch_options.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

// Functions that the fused optimizers share.

namespace tessera::optim {

inline Precision precision_of(const at::Tensor& values) {
  return values.scalar_type() == at::kFloat ? Precision::Float32 : Precision::Float64;
}

/// Gives `state` the memory layout and dtype of `values` and returns its data pointer. An undefined
/// `state` is created as zeros; a loaded one is converted if it differs. Throws UsageError when the
/// sizes differ.
void* match_state(const char* name, at::Tensor& state, const at::Tensor& values);

/// The state of `param`, created if it is missing. Throws UsageError when it has another type.
template <class State, class StateMap>
State& state_of(StateMap& states, const at::Tensor& param) {
  auto& slot = states[compat::state_key(param)];
  if (!slot) slot = std::make_unique<State>();
  auto* typed = dynamic_cast<State*>(slot.get());
  if (typed == nullptr) {
    throw UsageError(std::string("fused optimizer: the parameter's state is a ") +
                     typeid(*slot).name() + ", expected a " + typeid(State).name());
  }
  return *typed;
}

template <class Options>
std::unique_ptr<Options> checked(const Options& options) {
  constexpr bool sgd = std::is_same_v<Options, torch::optim::SGDOptions>;
  constexpr bool adam = std::is_same_v<Options, torch::optim::AdamOptions>;
  check_options(sgd ? "FusedSGD" : adam ? "FusedAdam" : "FusedAdamW", options);
  return std::make_unique<Options>(options);
}

/// The update of one parameter with its gradient.
struct Job {
  RangeUpdate update;
  at::Tensor grad;
};

/// Runs all jobs, on several threads when they are large.
void run_jobs(const std::vector<Job>& jobs);

}  // namespace tessera::optim

namespace tessera {

template <class Options, class State>
Fused<Options, State>::Fused(std::vector<torch::optim::OptimizerParamGroup> groups,
                             Options defaults)
    : FusedOptimizer(std::move(groups), optim::checked(defaults)) {}

template <class Options, class State>
Fused<Options, State>::Fused(std::vector<at::Tensor> params, Options defaults)
    : FusedOptimizer(std::move(params), optim::checked(defaults)) {}

template <class Options, class State>
void Fused<Options, State>::save(torch::serialize::OutputArchive& archive) const {
  torch::optim::serialize<State, Options>(archive, *this);
}

template <class Options, class State>
void Fused<Options, State>::load(torch::serialize::InputArchive& archive) {
  torch::optim::serialize<State, Options>(archive, *this);
}

}  // namespace tessera
