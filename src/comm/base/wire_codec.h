#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/wire.h"

namespace tessera::comm {

constexpr int64_t kWireBlock = 256;  ///< values of int8 that share a scale

/// Bytes of `numel` encoded values. `format` is not float32, here and below.
int64_t encoded_bytes(WireFormat format, int64_t numel);

/// `values` (1-D, floating-point) as encoded_bytes() bytes. int8: one byte for each value, zeros up
/// to a whole block, then a float32 scale for each block. A block with a value that is not finite
/// becomes NaN as a whole.
at::Tensor encode(WireFormat format, const at::Tensor& values);
/// The values of `bytes` as float32. std::logic_error unless it has encoded_bytes() bytes.
at::Tensor decode(WireFormat format, const at::Tensor& bytes, int64_t numel);

/// What the encoded values of one bucket lacked in the last step, for the values of the next step:
/// error feedback. A collective visits the values in an order that does not change.
class WireFeedback {
 public:
  /// Before a collective. A collective that is repeated within a step starts from the same values.
  void begin();
  /// encode() of `values` and of what they lacked in the last step.
  at::Tensor encode(WireFormat format, const at::Tensor& values);
  /// At the end of a step: its errors are those that the next step adds.
  void commit();
  /// Bytes of memory.
  int64_t bytes() const;

 private:
  std::vector<at::Tensor> kept_, left_;
};

/// While it lives, collectives that this thread starts in a group of ProcessGroup::with_wire() use
/// `feedback`, which lives at least until they are complete.
class WireFeedbackScope {
 public:
  explicit WireFeedbackScope(WireFeedback& feedback);
  ~WireFeedbackScope();
  WireFeedbackScope(const WireFeedbackScope&) = delete;
  WireFeedbackScope& operator=(const WireFeedbackScope&) = delete;

  static WireFeedback* current();

 private:
  WireFeedback* before_;
};

}  // namespace tessera::comm
