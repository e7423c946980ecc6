#pragma once

#include <string>

#include "optim/kernels.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"
#include "tessera/optim/fused_optimizer.h"

// What the three fused optimizers share.

namespace tessera::optim {

inline Precision precision_of(const at::Tensor& values) {
  return values.scalar_type() == at::kFloat ? Precision::Float32 : Precision::Float64;
}

/// `state` made to lie in memory as `values` does, with its dtype: created as zeros where
/// undefined, converted where a loaded one differs. Throws UsageError when the sizes differ.
void* match_state(const char* name, at::Tensor& state, const at::Tensor& values);

/// The state of `param` as the type that the optimizer keeps; created where missing.
template <class State, class StateMap>
State& state_of(StateMap& states, const at::Tensor& param) {
  auto& slot = states[compat::state_key(param)];
  if (!slot) {
    slot = std::make_unique<State>();
  }
  auto* typed = dynamic_cast<State*>(slot.get());
  if (typed == nullptr) {
    throw UsageError(std::string("fused optimizer: the parameter's state is a ") +
                     typeid(*slot).name() + ", expected a " + typeid(State).name());
  }
  return *typed;
}

/// A parameter's update with its gradient, ready to run.
struct Job {
  RangeUpdate update;
  at::Tensor grad;
};

/// Runs all jobs whole, on several threads where they are large.
void run_jobs(const std::vector<Job>& jobs);

}  // namespace tessera::optim
