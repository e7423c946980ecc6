#pragma once

#include <cstring>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#include <torch/version.h>

// The only file that knows which libtorch it is compiled with: 1.13 (Debian 12) up to the newest
// release.

#define TESSERA_TORCH_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Unsigned integers above 8 bits and 8-bit floats as dtypes.
#define TESSERA_TORCH_HAS_SMALL_TYPES TESSERA_TORCH_AT_LEAST(2, 3)

namespace c10d {
class ProcessGroup;
class Backend;
}  // namespace c10d

namespace tessera::compat {

/// What c10d calls one transport: ProcessGroup in 1.x, Backend since 2.0.
#if TESSERA_TORCH_AT_LEAST(2, 0)
using C10dBackend = c10d::Backend;
#else
using C10dBackend = c10d::ProcessGroup;
#endif

/// all_to_all of flat tensors; its name changed. `backend`: anything that derives from C10dBackend.
template <class Backend>
auto all_to_all_flat(Backend& backend, at::Tensor& output, at::Tensor& input,
                     std::vector<int64_t>& receive, std::vector<int64_t>& send) {
  if constexpr (requires { backend.all_to_all_single(output, input, receive, send); }) {
    return backend.all_to_all_single(output, input, receive, send);
  } else {
    return backend.alltoall_base(output, input, receive, send);
  }
}

/// Key of a parameter in `Optimizer::state()`: the address, as text before 2.0.
inline auto state_key(const at::Tensor& parameter) {
#if TESSERA_TORCH_AT_LEAST(2, 0)
  return static_cast<void*>(parameter.unsafeGetTensorImpl());
#else
  return c10::guts::to_string(parameter.unsafeGetTensorImpl());
#endif
}

template <class Base>
struct CopyingAllocator : Base {
  /// Since 2.x part of every allocator.
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

/// Base of an allocator of CPU memory that defines `serve`: libtorch's `allocate` is const in some
/// versions.
using Allocator = AllocatorFor<decltype(&at::Allocator::allocate)>;

/// c10 errors carry a backtrace after the first line.
inline std::string first_line(const char* message) {
  const std::string text(message);
  return text.substr(0, text.find('\n'));
}

/// Whether libtorch has Adam as one kernel over lists of tensors, on CUDA and on CPUs.
inline constexpr bool kHasFusedAdam = TESSERA_TORCH_AT_LEAST(2, 4);

struct FusedAdamLists {
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

/// One step of Adam, or of AdamW (`decoupled` decay), in place. Only where kHasFusedAdam.
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

/// Autocast on this thread, for CPUs and for CUDA.
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

/// While alive, autocast is as in `state`.
class AutocastState::Scope {
 public:
  explicit Scope(const AutocastState& state) : before_(current()) { state.apply(); }
  ~Scope() { before_.apply(); }
  Scope(const Scope&) = delete;

 private:
  AutocastState before_;
};

}  // namespace tessera::compat
