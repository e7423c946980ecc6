#include "comm/base/wire_codec.h"

#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>

namespace tessera::comm {
namespace {

constexpr float kLargestCode = 127;
// A float of this size has no bits for fractions: adding it rounds to the nearest integer, even
// where the compiler vectorises.
constexpr float kRounder = 12582912;

int64_t blocks_of(int64_t numel) { return (numel + kWireBlock - 1) / kWireBlock; }

float encode_block(const float* values, int64_t n, int8_t* codes) {
  float largest = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float size = std::fabs(values[i]);
    largest = size > largest ? size : largest;
    finite = finite && size <= FLT_MAX;
  }
  std::memset(codes, 0, kWireBlock);
  if (!finite) return std::numeric_limits<float>::quiet_NaN();
  const float inverse = kLargestCode / largest;
  if (inverse > FLT_MAX) return 0;  // zeros, or too small for a scale
  for (int64_t i = 0; i < n; ++i) {
    const float code = (values[i] * inverse + kRounder) - kRounder;
    codes[i] = static_cast<int8_t>(code);
  }
  return largest / kLargestCode;
}

}  // namespace

int64_t encoded_bytes(WireFormat format, int64_t numel) {
  if (format == WireFormat::bfloat16) return 2 * numel;
  return blocks_of(numel) * (kWireBlock + static_cast<int64_t>(sizeof(float)));
}

at::Tensor encode(WireFormat format, const at::Tensor& values) {
  if (format == WireFormat::bfloat16) return values.to(at::kBFloat16).contiguous().view(at::kByte);
  const auto floats = values.to(at::kFloat).contiguous();
  const int64_t numel = floats.numel(), blocks = blocks_of(numel);
  auto bytes = at::empty({encoded_bytes(format, numel)}, at::TensorOptions().dtype(at::kByte));
  const auto* from = static_cast<const float*>(floats.data_ptr());
  auto* codes = static_cast<int8_t*>(bytes.data_ptr());
  int8_t* scales = codes + blocks * kWireBlock;
  for (int64_t b = 0; b < blocks; ++b, codes += kWireBlock, scales += sizeof(float)) {
    const int64_t begin = b * kWireBlock;
    const float scale = encode_block(from + begin, std::min(kWireBlock, numel - begin), codes);
    std::memcpy(scales, &scale, sizeof(scale));
  }
  return bytes;
}

at::Tensor decode(WireFormat format, const at::Tensor& bytes, int64_t numel) {
  if (bytes.numel() != encoded_bytes(format, numel) || bytes.scalar_type() != at::kByte) {
    throw std::logic_error(fmt::format(
        "{} values in {} are {} elements of {}; expected {} bytes", numel, to_string(format),
        bytes.numel(), c10::toString(bytes.scalar_type()), encoded_bytes(format, numel)));
  }
  if (format == WireFormat::bfloat16) {
    auto values = at::empty({numel}, at::TensorOptions().dtype(at::kBFloat16));
    if (numel > 0) std::memcpy(values.data_ptr(), bytes.data_ptr(), bytes.numel());
    return values.to(at::kFloat);
  }
  auto values = at::empty({numel}, at::TensorOptions().dtype(at::kFloat));
  auto* to = static_cast<float*>(values.data_ptr());
  const int64_t blocks = blocks_of(numel);
  const auto* codes = static_cast<const int8_t*>(bytes.data_ptr());
  const int8_t* scales = codes + blocks * kWireBlock;
  for (int64_t b = 0; b < blocks; ++b, codes += kWireBlock, scales += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, scales, sizeof(scale));
    const int64_t n = std::min(kWireBlock, numel - b * kWireBlock);
    for (int64_t i = 0; i < n; ++i) *to++ = static_cast<float>(codes[i]) * scale;
  }
  return values;
}

void WireFeedback::begin() {
  const std::lock_guard lock(mutex_);
  left_.clear();
}

at::Tensor WireFeedback::encode(WireFormat format, const at::Tensor& values) {
  auto wanted = values.to(at::kFloat);
  at::Tensor error;
  {
    const std::lock_guard lock(mutex_);
    const size_t place = left_.size();
    if (kept_ && place < kept_->size()) error = (*kept_)[place];
  }
  if (error.defined()) {
    if (error.numel() != wanted.numel())
      throw std::logic_error("the windows of a bucket have changed between two steps");
    wanted = wanted + error;
  }
  auto bytes = comm::encode(format, wanted);
  // A block that is not finite is NaN everywhere, in this step alone.
  error = (wanted - decode(format, bytes, wanted.numel())).nan_to_num_(0, 0, 0);
  const std::lock_guard lock(mutex_);
  left_.push_back(std::move(error));
  return bytes;
}

void WireFeedback::commit() {
  const std::lock_guard lock(mutex_);
  if (!left_.empty())
    kept_ = std::make_shared<const std::vector<at::Tensor>>(std::exchange(left_, {}));
}

void WireFeedback::accept() {
  const std::lock_guard lock(mutex_);
  accepted_ = kept_;
}

void WireFeedback::discard() {
  const std::lock_guard lock(mutex_);
  kept_ = accepted_;
}

void WireFeedback::rescale(double factor) {
  if (factor == 1) return;
  const auto scaled = [factor](const Errors& errors) -> Errors {
    if (!errors) return {};
    std::vector<at::Tensor> result;
    // An infinity would make the values of every later step NaN.
    for (const auto& error : *errors) result.push_back((error * factor).nan_to_num_(0, 0, 0));
    return std::make_shared<const std::vector<at::Tensor>>(std::move(result));
  };
  const std::lock_guard lock(mutex_);
  const bool same = accepted_ == kept_;
  kept_ = scaled(kept_);
  accepted_ = same ? kept_ : scaled(accepted_);
}

int64_t WireFeedback::bytes() const {
  const std::lock_guard lock(mutex_);
  int64_t total = 0;
  const auto add = [&total](const std::vector<at::Tensor>& errors) {
    for (const auto& tensor : errors) total += static_cast<int64_t>(tensor.nbytes());
  };
  add(left_);
  if (kept_) add(*kept_);
  if (accepted_ && accepted_ != kept_) add(*accepted_);
  return total;
}

namespace {
thread_local std::shared_ptr<WireFeedback> current_feedback;
}  // namespace

WireFeedbackScope::WireFeedbackScope(std::shared_ptr<WireFeedback> feedback)
    : before_(std::exchange(current_feedback, std::move(feedback))) {}
WireFeedbackScope::~WireFeedbackScope() { current_feedback = std::move(before_); }
const std::shared_ptr<WireFeedback>& WireFeedbackScope::current() { return current_feedback; }

}  // namespace tessera::comm
