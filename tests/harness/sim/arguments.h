#pragma once

#include <memory>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "harness/sim/sim.h"

namespace tessera::sim {

/// A tensor as the argument of a kernel: an address with sizes and strides, and no ownership.
struct Argument {
  bool defined = false;
  char* data = nullptr;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes, strides;
  at::Tensor number;  ///< For a tensor of no dimensions on the CPU: its copy.

  at::Tensor on_cpu() const;
};

bool on_device(const at::Tensor& tensor);
/// Throws if the tensor is on the CPU and has dimensions.
Argument argument_of(const at::Tensor& tensor);
/// For tensors on the CPU that copies read or write in place.
Argument host_argument_of(const at::Tensor& tensor);

using Convert = std::function<at::Tensor(const at::Tensor&)>;
/// `value` with each tensor in it converted, and devices replaced.
c10::IValue converted(const c10::IValue& value, at::DeviceType device, const Convert& convert);

/// One call of an operator, to be run later on CPU tensors over the arguments' memory.
class KernelCall {
 public:
  KernelCall(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments);
  /// Returns the operator's results. Errors name the operator.
  torch::jit::Stack run() const;

 private:
  c10::OperatorHandle op_;
  torch::jit::Stack template_;  // undefined tensors stand for the arguments, in order
  std::vector<Argument> arguments_;
};

}  // namespace tessera::sim
