#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
namespace tessera {

struct RangeUpdate;

/// Updates elements [offset, offset + n) of the parameter that `update` describes. `grad` and
/// `copy_out` point to elements of the parameter's dtype.
using RangeKernel = void (*)(const RangeUpdate& update, int64_t offset, const void* grad, int64_t n,
                             double grad_scale, void* copy_out);

/// The update of one parameter in one step: pointers to its values and the step's coefficients,
/// whose meaning only the kernel knows. Copyable. Owns nothing; valid until the optimizer's state
/// or the parameter's storage changes.
struct RangeUpdate {
  RangeKernel kernel = nullptr;
  void* parameter = nullptr;
  void* first = nullptr;    // exp_avg, or SGD's momentum buffer
  void* second = nullptr;   // exp_avg_sq
  void* maximum = nullptr;  // max_exp_avg_sq
  int64_t numel = 0;
  double coefficients[9] = {};
};

}  // namespace tessera
#pragma GCC visibility pop
