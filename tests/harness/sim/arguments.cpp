#include "harness/sim/arguments.h"

#include <stdexcept>

#include <ATen/core/LegacyTypeDispatch.h>

#include "harness/sim/memory.h"

namespace tessera::sim {

bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

at::Tensor Argument::on_cpu() const {
  if (!defined) return {};
  if (number.defined()) return number;
  return at::for_blob(data, sizes).strides(strides).options(at::TensorOptions(dtype)).make_tensor();
}

Argument host_argument_of(const at::Tensor& tensor) {
  return {true,
          static_cast<char*>(tensor.data_ptr()),
          tensor.scalar_type(),
          tensor.sizes().vec(),
          tensor.strides().vec(),
          {}};
}

Argument argument_of(const at::Tensor& tensor) {
  Argument result;
  if (!tensor.defined()) return result;
  result.defined = true;
  result.dtype = tensor.scalar_type();
  if (!on_device(tensor)) {
    TORCH_CHECK(tensor.device().is_cpu() && tensor.dim() == 0,
                "sim: expected all tensors on the device, but found one on ", tensor.device(),
                " of shape ", tensor.sizes());
    result.number = tensor.detach().clone();
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
      result.number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return result;
  }
  auto* const storage =
      static_cast<char*>(const_cast<void*>(static_cast<const void*>(tensor.storage().data())));
  if (storage)
    result.data = kernel_address(storage) + tensor.storage_offset() * tensor.element_size();
  result.sizes = tensor.sizes().vec();
  result.strides = tensor.strides().vec();
  return result;
}

c10::IValue converted(const c10::IValue& value, at::DeviceType device, const Convert& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isDevice()) return at::Device(device);
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (!value.isList()) return value;
  const auto list = value.toList();  // perhaps of optional tensors
  c10::impl::GenericList result(list.elementType());
  bool any = false;
  for (size_t i = 0; i < list.size(); ++i) {
    const c10::IValue element = list.get(i);
    any = any || element.isTensor();
    result.push_back(element.isTensor() ? c10::IValue(convert(element.toTensor())) : element);
  }
  return any ? c10::IValue(result) : value;
}

KernelCall::KernelCall(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments)
    : op_(op) {
  for (const auto& argument : arguments) {
    template_.push_back(converted(argument, at::kCPU, [&](const at::Tensor& tensor) {
      arguments_.push_back(argument_of(tensor));
      return at::Tensor();
    }));
  }
}

torch::jit::Stack KernelCall::run() const {
  try {
    torch::jit::Stack stack;
    size_t next = 0;
    for (const auto& value : template_) {
      stack.push_back(converted(value, at::kCPU,
                                [&](const at::Tensor&) { return arguments_[next++].on_cpu(); }));
    }
    const at::AutoDispatchBelowAutograd below;
    op_.callBoxed(&stack);
    return stack;
  } catch (const std::exception& error) {
    throw std::runtime_error("sim: kernel " + op_.schema().name() + ": " + error.what());
  }
}

}  // namespace tessera::sim
