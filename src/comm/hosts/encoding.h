#pragma once

#include "comm/base/wire_codec.h"

namespace tessera::comm {

/// The form of floating-point values between the hosts, and the error feedback of this collective
/// (null: none).
struct Encoding {
  WireFormat format = WireFormat::float32;
  WireFeedback* feedback = nullptr;

  /// False: values travel as they are.
  explicit operator bool() const { return format != WireFormat::float32; }
  at::Tensor encode(const at::Tensor& values) const {
    return feedback ? feedback->encode(format, values) : comm::encode(format, values);
  }
  at::Tensor decode(const at::Tensor& bytes, int64_t numel) const {
    return comm::decode(format, bytes, numel);
  }
  /// Memory for an encoded message.
  at::Tensor message(int64_t numel) const {
    return at::empty({encoded_bytes(format, numel)}, at::TensorOptions().dtype(at::kByte));
  }
};

}  // namespace tessera::comm
