// Operators on the device: a boxed fallback that enqueues libtorch's CPU kernels, and the few
// operators that a device must have of its own.
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "harness/sim/arguments.h"
#include "harness/sim/generators.h"
#include "harness/sim/memory.h"
#include "harness/sim/streams.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::sim {
namespace {

#if TESSERA_TORCH_AT_LEAST(2, 0)
template <class T>
using Optional = std::optional<T>;
#else
template <class T>
using Optional = c10::optional<T>;
#endif
using Stack = torch::jit::Stack;
using Values = std::vector<c10::IValue>;

StreamQueue& queue() { return queue_of(current_stream(current_device())); }

void enqueue_here(std::function<void()> kernel) {
  enqueue(current_stream(current_device()), std::move(kernel));
}

at::Tensor empty_from(const at::Tensor& meta) {
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           meta.scalar_type());
}

void copy(const Argument& from, const Argument& to) {
  const at::AutoDispatchBelowAutograd below;
  to.on_cpu().copy_(from.on_cpu());
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!on_device(tensor)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

/// The operator's results without data. Throws where libtorch has no meta kernel.
Stack on_meta(const c10::OperatorHandle& op, const Values& arguments) {
  // libtorch 1.13 has none for this one.
  if (op.schema().name() == "aten::abs") return {meta_of(arguments[0].toTensor())};
  Stack stack;
  for (const auto& argument : arguments) stack.push_back(converted(argument, at::kMeta, meta_of));
  const at::AutoDispatchBelowAutograd below;
  op.callBoxed(&stack);
  return stack;
}

/// A view has the sizes, strides and offset that the operator gives to a meta tensor.
at::Tensor view_of(const c10::OperatorHandle& op, const Values& arguments) {
  const auto self = arguments[0].toTensor();
  const auto options = at::TensorOptions(self.scalar_type()).device(at::kMeta);
  const auto elements = static_cast<int64_t>(self.storage().nbytes() / self.element_size());
  auto meta = at::empty({0}, options);
  auto* impl = meta.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(at::empty({elements}, options).storage(), meta.dtype());
  impl->set_sizes_and_strides(self.sizes(), self.strides());
  impl->set_storage_offset(self.storage_offset());
  Stack stack(arguments.begin(), arguments.end());
  stack[0] = meta;
  {
    const at::AutoDispatchBelowAutograd below;
    op.callBoxed(&stack);
  }
  const auto got = stack[0].toTensor();
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(),
      c10::scalarTypeToTypeMeta(got.scalar_type()));
  view.unsafeGetTensorImpl()->set_storage_offset(got.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(got.sizes(), got.strides());
  return view;
}

/// The argument that result `r` of an operator with out= or in place is.
size_t written_by(const c10::FunctionSchema& schema, size_t r) {
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && *alias == *schema.returns()[r].alias_info()) return i;
  }
  TORCH_CHECK(false, "sim: ", schema.name(), " has a result without its argument");
}

const at::Tensor& resize_to(const at::Tensor& self, c10::IntArrayRef size,
                            Optional<c10::MemoryFormat> = {}) {
  const auto elements = c10::multiply_integers(size) + self.storage_offset();
  const size_t bytes = elements * self.element_size();
  if (self.storage().nbytes() < bytes) {
    TORCH_CHECK(self.storage().nbytes() == 0, "sim: resize_ of a tensor with contents");
    auto* storage = self.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(device_allocator()->allocate(bytes));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

/// A result of run_now() on the device. The wait for the operator is the only one.
at::Tensor placed(const at::Tensor& result) {
  if (!result.defined()) return result;
  const auto there = empty_from(result);
  enqueue_here([result, to = argument_of(there)] {
    const at::AutoDispatchBelowAutograd below;
    to.on_cpu().copy_(result);
  });
  return there;
}

/// Runs the operator while the host waits, and returns its results on the CPU.
Stack run_now(const c10::OperatorHandle& op, const KernelCall& call) {
  queue().wait(op.schema().name());
  return call.run();
}

/// Empty tensors that are passed as out= get their shape before the kernel is enqueued.
void shape_outputs(const c10::OperatorHandle& op, const Values& arguments) {
  const auto& schema = op.schema();
  bool empty = false;
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    const auto& argument = arguments[written_by(schema, r)];
    empty = empty || (argument.isTensor() && argument.toTensor().numel() == 0);
  }
  if (!empty) return;
  const auto shapes = on_meta(op, arguments);
  for (size_t r = 0; r < schema.returns().size(); ++r) {
    auto output = arguments[written_by(schema, r)].toTensor();
    const auto shape = shapes[r].toTensor();
    if (output.numel() > 0 || shape.numel() == 0) continue;
    resize_to(output, shape.sizes());
    output.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
  }
}

Stack write_in_place(const c10::OperatorHandle& op, const Values& arguments, bool random) {
  shape_outputs(op, arguments);
  enqueue_here([call = KernelCall(op, arguments)] { call.run(); });
  if (random) queue().wait("random numbers");  // one order of draws
  Stack results;
  for (size_t r = 0; r < op.schema().returns().size(); ++r)
    results.push_back(arguments[written_by(op.schema(), r)]);
  return results;
}

/// Known without a call: an error of libtorch has a backtrace, which takes some milliseconds.
bool has_meta_kernel(const c10::OperatorHandle& op) {
  for (const auto key : {c10::DispatchKey::Meta, c10::DispatchKey::CompositeExplicitAutograd,
                         c10::DispatchKey::CompositeExplicitAutogradNonFunctional,
                         c10::DispatchKey::CompositeImplicitAutograd})
    if (op.hasKernelForDispatchKey(key)) return true;
  return false;
}

/// The results' shapes, or false where they depend on the data.
bool shapes_of(const c10::OperatorHandle& op, const Values& arguments, Stack& shapes) {
  if (!has_meta_kernel(op)) return false;
  try {
    shapes = on_meta(op, arguments);
  } catch (const std::exception&) {
    return false;
  }
  for (const auto& shape : shapes)
    if (!shape.isTensor()) return false;
  return true;
}

Stack make_results(const c10::OperatorHandle& op, const Values& arguments, bool random) {
  KernelCall call(op, arguments);
  Stack shapes, results;
  if (op.schema().returns().empty()) {
    enqueue_here([call] { call.run(); });
  } else if (!random && shapes_of(op, arguments, shapes)) {
    std::vector<Argument> outputs;
    for (const auto& shape : shapes) {
      const auto meta = shape.toTensor();
      results.push_back(meta.defined() ? empty_from(meta) : at::Tensor());
      outputs.push_back(argument_of(results.back().toTensor()));
    }
    enqueue_here([call, outputs] {
      const auto got = call.run();
      const at::AutoDispatchBelowAutograd below;
      for (size_t i = 0; i < outputs.size(); ++i)
        if (outputs[i].defined && got[i].toTensor().defined())
          outputs[i].on_cpu().copy_(got[i].toTensor());
    });
  } else {
    for (const auto& value : run_now(op, call)) results.push_back(converted(value, kType, placed));
  }
  return results;
}

/// The device of the first argument that is on one; all must be on it.
int device_of(const c10::OperatorHandle& op, const Values& arguments) {
  int found = -1;
  for (const auto& argument : arguments) {
    converted(argument, kType, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return tensor;
      TORCH_CHECK(found < 0 || found == tensor.device().index(), "sim: ", op.schema().name(),
                  " got tensors on two devices");
      found = tensor.device().index();
      return tensor;
    });
  }
  return found < 0 ? current_device() : found;
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Values arguments = torch::jit::last(*stack, schema.arguments().size()).vec();
  const c10::DeviceGuard guard(device(device_of(op, arguments)));
  bool random = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() != "generator") continue;
    random = true;
    if (arguments[i].isNone()) arguments[i] = generator(current_device());
  }
  const auto* alias = schema.returns().empty() ? nullptr : schema.returns()[0].alias_info();
  Stack results;
  if (alias && !alias->isWrite()) {
    TORCH_CHECK(schema.returns()[0].type()->kind() == c10::TypeKind::TensorType,
                "sim: no views in lists: ", schema.name());
    results.push_back(view_of(op, arguments));
  } else {
    count_kernel();
    results = alias ? write_in_place(op, arguments, random) : make_results(op, arguments, random);
  }
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
}

c10::DeviceGuard on(Optional<at::Device> where) {
  return c10::DeviceGuard(where && where->has_index() ? *where : device(current_device()));
}

at::Tensor empty(c10::IntArrayRef size, Optional<c10::ScalarType> dtype, Optional<c10::Layout>,
                 Optional<at::Device> where, Optional<bool>, Optional<c10::MemoryFormat> format) {
  const auto guard = on(where);
  return at::detail::empty_generic(size, device_allocator(),
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         Optional<c10::ScalarType> dtype, Optional<c10::Layout>,
                         Optional<at::Device> where, Optional<bool>) {
  const auto guard = on(where);
  return at::detail::empty_strided_generic(size, stride, device_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

/// Whether a copy of bytes does. libtorch converts and reorders on the CPU, in pageable memory.
bool is_copy_of_bytes(const at::Tensor& from, const at::Tensor& to) {
  if (from.scalar_type() != to.scalar_type() || from.sizes() != to.sizes()) return false;
  return (from.is_contiguous() && to.is_contiguous()) ||
         (from.strides() == to.strides() && from.is_non_overlapping_and_dense());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const c10::DeviceGuard guard(on_device(self) ? self.device() : to.device());
  const auto argument = [](const at::Tensor& tensor) {
    return on_device(tensor) ? argument_of(tensor) : host_argument_of(tensor);
  };
  if (to.numel() == 0) return to;
  enqueue_here([a = argument(self), b = argument(to)] { copy(a, b); });
  if (on_device(self) && on_device(to)) return to;
  const auto& cpu = on_device(self) ? to : self;
  const std::string direction = on_device(self) ? "copy to" : "copy from";
  // CUDA may wait for the stream before it has staged pageable memory.
  if (!is_pinned(cpu.storage().data())) queue().wait(direction + " pageable memory");
  else if (!is_copy_of_bytes(self, to)) queue().wait(direction + " memory that converts");
  else if (!non_blocking) queue().wait(direction + " pinned memory");
  return to;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  queue().wait("item");
  return argument_of(self).on_cpu().item();
}

/// Lets Module::to() exchange the data of parameters.
bool compatible(const at::Tensor&, const at::Tensor&) { return true; }

void record_stream(at::Tensor& self, c10::Stream stream) {
  record_use(self.storage().data(), stream);
}

}  // namespace

at::Tensor kernel_view(const at::Tensor& tensor) { return argument_of(tensor).on_cpu(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("record_stream", record_stream);
  m.impl("resize_", resize_to);
  // One launch for a list of tensors, as on CUDA.
  for (const char* name : {"_foreach_zero_", "_foreach_add_.List", "_foreach_add_.Scalar",
                           "_foreach_mul_.Scalar", "_foreach_div_.Scalar", "_foreach_sqrt_",
                           "_foreach_addcmul_.Scalar", "_foreach_addcdiv_.Scalar"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // libtorch composes these of others on unknown devices, which gives other bits than on the CPU.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
#if !TESSERA_TORCH_AT_LEAST(2, 0)
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
#else
// libtorch 2.6 has no fallback there, and composes nothing of what has a kernel above.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", torch::CppFunction::makeFallthrough());
}
#endif

}  // namespace tessera::sim
