#pragma once

#include <cstdint>

namespace tessera {

struct RangeUpdate;

/// Updates elements [offset, offset + n) of `update`; pointers are to elements of its parameter's
/// dtype.
using RangeKernel = void (*)(const RangeUpdate& update, int64_t offset, const void* grad, int64_t n,
                             double grad_scale, void* copy_out);

/// One parameter's update in one step: where its values are and this step's coefficients. Copyable;
/// owns nothing, and is valid until the optimizer's state or the parameter's storage changes. What
/// the coefficients mean is known to the kernel alone.
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
