#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/types.h>
#include <torch/version.h>

// All differences between the supported versions of libtorch, from 1.13 (Debian 12) to the newest
// release, are handled in this file alone.

#define TESSERA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// libtorch has dtypes for unsigned integers of more than 8 bits and for 8-bit floats.
#define TESSERA_TORCH_HAS_SMALL_TYPES TESSERA_TORCH_AT_LEAST(2, 3)

namespace c10d {
class ProcessGroup;
class Backend;
}  // namespace c10d

#pragma GCC visibility push(default)
namespace tessera::compat {

/// c10d's class for one transport: ProcessGroup in 1.x, Backend since 2.0.
#if TESSERA_TORCH_AT_LEAST(2, 0)
using C10dBackend = c10d::Backend;
#else
using C10dBackend = c10d::ProcessGroup;
#endif

/// all_to_all of flat tensors. The function's name differs between versions. `Backend` derives from
/// C10dBackend.
template <class Backend>
auto all_to_all_flat(Backend& backend, at::Tensor& output, at::Tensor& input,
                     std::vector<int64_t>& receive, std::vector<int64_t>& send) {
  if constexpr (requires { backend.all_to_all_single(output, input, receive, send); })
    return backend.all_to_all_single(output, input, receive, send);
  else return backend.alltoall_base(output, input, receive, send);
}

/// Ends the collectives in which a c10d backend waits, if version and backend support it.
template <class Backend>
void abort(Backend& backend) noexcept {
  if constexpr (requires { backend.abort(); }) {
    try {
      backend.abort();
    } catch (...) {
      // It waits for nothing, or it cannot abort.
    }
  }
}

/// The key of a parameter in `Optimizer::state()`: its address, as text before 2.0.
inline auto state_key(const at::Tensor& parameter) {
#if TESSERA_TORCH_AT_LEAST(2, 0)
  return static_cast<void*>(parameter.unsafeGetTensorImpl());
#else
  return c10::guts::to_string(parameter.unsafeGetTensorImpl());
#endif
}

template <class Base>
struct CopyingAllocator : Base {
  /// Pure virtual in at::Allocator since 2.x.
  void copy_data(void* to, const void* from, std::size_t bytes) const {
    std::memcpy(to, from, bytes);
  }
};

template <class Allocate>
struct AllocatorFor;
template <class Base>
struct AllocatorFor<at::DataPtr (Base::*)(size_t) const> : CopyingAllocator<Base> {
  at::DataPtr allocate(size_t bytes) const final { return serve(bytes); }
  virtual at::DataPtr serve(size_t bytes) const = 0;
};
template <class Base>
struct AllocatorFor<at::DataPtr (Base::*)(size_t)> : CopyingAllocator<Base> {
  at::DataPtr allocate(size_t bytes) final { return serve(bytes); }
  virtual at::DataPtr serve(size_t bytes) const = 0;
};

/// Base class of CPU allocators. Derived classes override serve() instead of allocate(), which is
/// const in some versions of libtorch and not in others.
using Allocator = AllocatorFor<decltype(&at::Allocator::allocate)>;

/// Base class of our own stores; `Store` is c10d::Store. Its clone() exists since 2.x.
template <class Store>
struct CloneableStore : Store {
  using Store::Store;
  virtual c10::intrusive_ptr<Store> clone() = 0;
};

/// The first line of an error message. The messages of c10 continue with a backtrace.
inline std::string first_line(const char* message) {
  const std::string text(message);
  return text.substr(0, text.find('\n'));
}

/// Options of a c10d::TCPStore that needs no libuv. Libtorch asks for it by default from 2.4 on,
/// and Debian's does not have it.
template <class Options>
Options without_libuv(Options options) {
  if constexpr (requires { options.useLibUV; }) options.useLibUV = false;
  return options;
}

/// The data pointer of a storage, also where libtorch throws at an access.
template <class Storage = c10::StorageImpl>
const at::DataPtr& unchecked_data_ptr(Storage* storage) {
  if constexpr (requires { storage->_mutable_data_ptr_no_checks(); })
    return storage->_mutable_data_ptr_no_checks();
  else return storage->data_ptr();
}

#if TESSERA_TORCH_AT_LEAST(2, 6) && !TESSERA_TORCH_AT_LEAST(2, 15)
// These versions can refuse access to a storage's data, but have no function that allows it again.
// C++ does not check access in an explicit instantiation, so it may name the private member.
struct RefusesData {
  friend bool c10::StorageImpl::*member(RefusesData);
};
template <bool c10::StorageImpl::*Member>
struct NameRefusesData {
  friend bool c10::StorageImpl::*member(RefusesData) { return Member; }
};
template struct NameRefusesData<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

template <class Storage>
void allow_data(Storage* storage) {
  storage->*member(RefusesData()) = false;
}
#else
template <class Storage>
void allow_data(Storage* storage) {
  storage->clear_data_ptr_access_error_msg_();
}
#endif

/// An access to the storage's data is a c10::Error with this text; empty: it is allowed. Older
/// libtorch has no such text; its own check finds the null pointer.
template <class Storage = c10::StorageImpl>
void refuse_data(Storage* storage, const std::string& text) {
  if constexpr (TESSERA_TORCH_AT_LEAST(2, 6)) {
    if (text.empty()) allow_data(storage);
    else storage->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  }
}

/// True if libtorch has Adam and SGD as one kernel over lists of tensors, on CUDA and on CPUs.
inline constexpr bool kHasFusedAdam = TESSERA_TORCH_AT_LEAST(2, 4);

struct FusedAdamLists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

/// One step of Adam, or of AdamW if `decoupled` (weight decay), in place. Does nothing unless
/// kHasFusedAdam.
inline void fused_adam(FusedAdamLists& lists, bool decoupled, double lr, double beta1, double beta2,
                       double weight_decay, double eps, bool amsgrad) {
#if TESSERA_TORCH_AT_LEAST(2, 4)
  const auto call = [&](auto kernel) {
    kernel(lists.params, lists.grads, lists.exp_avgs, lists.exp_avg_sqs, lists.max_exp_avg_sqs,
           lists.steps);
  };
  if (decoupled) {
    call([&](auto&... l) {
      at::_fused_adamw_(l..., lr, beta1, beta2, weight_decay, eps, amsgrad, false);
    });
  } else {
    call([&](auto&... l) {
      at::_fused_adam_(l..., lr, beta1, beta2, weight_decay, eps, amsgrad, false);
    });
  }
#endif
}

/// One step of SGD, in place. `buffers`: of the momentum, empty without one; undefined values if
/// `first`. Does nothing unless kHasFusedAdam.
inline void fused_sgd(const std::vector<at::Tensor>& params, const std::vector<at::Tensor>& grads,
                      const std::vector<at::Tensor>& buffers, double weight_decay, double momentum,
                      double lr, double dampening, bool nesterov, bool first) {
#if TESSERA_TORCH_AT_LEAST(2, 4)
  at::_fused_sgd_(params, grads, buffers, weight_decay, momentum, lr, dampening, nesterov, false,
                  first);
#endif
}

/// The autocast settings of this thread, for CPU and CUDA.
struct AutocastState {
  struct Device {
    bool enabled;
    at::ScalarType dtype;
  };
  Device cpu, cuda;

  static AutocastState current() {
#if TESSERA_TORCH_AT_LEAST(2, 4)
    const auto of = [](at::DeviceType type) {
      return Device{at::autocast::is_autocast_enabled(type),
                    at::autocast::get_autocast_dtype(type)};
    };
    return {of(at::kCPU), of(at::kCUDA)};
#else
    return {{at::autocast::is_cpu_enabled(), at::autocast::get_autocast_cpu_dtype()},
            {at::autocast::is_enabled(), at::autocast::get_autocast_gpu_dtype()}};
#endif
  }

  void apply() const {
#if TESSERA_TORCH_AT_LEAST(2, 4)
    const auto set = [](at::DeviceType type, const Device& device) {
      at::autocast::set_autocast_enabled(type, device.enabled);
      at::autocast::set_autocast_dtype(type, device.dtype);
    };
    set(at::kCPU, cpu);
    set(at::kCUDA, cuda);
#else
    at::autocast::set_cpu_enabled(cpu.enabled);
    at::autocast::set_autocast_cpu_dtype(cpu.dtype);
    at::autocast::set_enabled(cuda.enabled);
    at::autocast::set_autocast_gpu_dtype(cuda.dtype);
#endif
  }

  class Scope;
};

/// Applies `state` to this thread while alive, then restores the settings from before.
class AutocastState::Scope {
 public:
  explicit Scope(const AutocastState& state) : before_(current()) { state.apply(); }
  ~Scope() { before_.apply(); }
  Scope(const Scope&) = delete;

 private:
  AutocastState before_;
};

/// The dtype of products with `tensor` under this thread's autocast; none if autocast leaves them.
inline std::optional<at::ScalarType> autocast_dtype(const at::Tensor& tensor) {
  const AutocastState state = AutocastState::current();
  const auto& device = tensor.is_cuda() ? state.cuda : state.cpu;
  const bool applies = device.enabled && (tensor.is_cpu() || tensor.is_cuda()) &&
                       tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
  return applies ? std::optional(device.dtype) : std::nullopt;
}

/// True if fused_causal_attention() has a kernel for such tensors that does not hold all scores.
/// libtorch has had one for CPUs, without dropout, since 2.2. Those for CUDA need a width of whole
/// vectors.
inline bool has_fused_attention(const at::Tensor& query, double dropout) {
  if (!TESSERA_TORCH_AT_LEAST(2, 2)) return false;
  const auto dtype = query.scalar_type();
  return query.is_cpu() ? dropout == 0 && dtype != at::kHalf
                        : query.is_cuda() && dtype != at::kDouble && query.size(-1) % 8 == 0;
}

/// libtorch's causal attention of [N, T, width] tensors, where has_fused_attention().
inline at::Tensor fused_causal_attention(const at::Tensor& q, const at::Tensor& k,
                                         const at::Tensor& v, double dropout) {
#if TESSERA_TORCH_AT_LEAST(2, 2)
  const auto heads = [](const at::Tensor& x) { return x.unsqueeze(0); };
  return at::scaled_dot_product_attention(heads(q), heads(k), heads(v), {}, dropout, true)
      .squeeze(0);
#else
  TORCH_INTERNAL_ASSERT(false, "no fused attention in this version");
#endif
}

}  // namespace tessera::compat
#pragma GCC visibility pop
