#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
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

/// The rounding errors of the encoded values of one bucket, for the values of its next collective:
/// error feedback. A collective visits the values in an order that does not change. A step has one
/// collective or several; each one adds the errors of the one before. Any thread may call the
/// members while a collective runs on the group's thread.
class WireFeedback {
 public:
  /// Before a collective. One that is repeated before commit() starts from the same errors.
  void begin();
  /// encode() of `values` plus their errors of the last collective.
  at::Tensor encode(WireFormat format, const at::Tensor& values);
  /// The collective is complete: the next one adds its errors.
  void commit();
  /// The sums since the last accepted step were used.
  void accept();
  /// They were dropped: the next collective adds the same errors as the first one after the last
  /// accepted step, or none if no step was accepted.
  void discard();
  /// The next values are `factor` times as large.
  void rescale(double factor);
  /// Bytes of memory.
  int64_t bytes() const;

 private:
  using Errors = std::shared_ptr<const std::vector<at::Tensor>>;  // null: none

  mutable std::mutex mutex_;
  std::vector<at::Tensor> left_;  // by the collective that runs
  Errors kept_;                   // by the last one that was committed
  Errors accepted_;               // by the last one of the last accepted step
};

/// While the object lives, collectives that this thread starts in a group of
/// ProcessGroup::with_wire() use `feedback`. They own it until they are complete.
class WireFeedbackScope {
 public:
  explicit WireFeedbackScope(std::shared_ptr<WireFeedback> feedback);
  ~WireFeedbackScope();
  WireFeedbackScope(const WireFeedbackScope&) = delete;
  WireFeedbackScope& operator=(const WireFeedbackScope&) = delete;

  static const std::shared_ptr<WireFeedback>& current();

 private:
  std::shared_ptr<WireFeedback> before_;
};

}  // namespace tessera::comm
