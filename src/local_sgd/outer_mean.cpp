#include "local_sgd/outer_mean.h"

#include "comm/base/wire_codec.h"

namespace tessera::local_sgd {

using comm::decode;
using comm::encode;

void OuterMean::start(const at::Tensor& values) {
  const at::NoGradGuard no_grad;
  under_way_ = true;
  complete_ = false;
  values_ = values;
  if (wire_ == OuterWire::float32) {
    work_ = outer_.all_reduce_async(values_, 1.0 / outer_.size(), "LocalSgd: differences");
    return;
  }
  // Bytes are encoded and decoded by the host.
  at::Tensor wanted = values.to(at::kCPU, at::kFloat);
  if (residual.defined()) wanted = wanted + residual.cpu();
  const at::Tensor own = encode(WireFormat::int8, wanted);
  residual = wanted - decode(WireFormat::int8, own, values.numel());
  bytes_ = at::empty({own.numel() * outer_.size()}, own.options());
  bytes_.narrow(0, own.numel() * outer_.rank(), own.numel()).copy_(own);
  work_ = outer_.all_gather_async(
      bytes_, std::vector<int64_t>(static_cast<size_t>(outer_.size()), own.numel()),
      "LocalSgd: differences in int8");
}

at::Tensor OuterMean::peek() {
  if (complete_) return values_;
  const at::NoGradGuard no_grad;
  work_.wait();
  work_ = Work();
  if (wire_ == OuterWire::int8) {
    const int64_t numel = values_.numel(), size = comm::encoded_bytes(WireFormat::int8, numel);
    at::Tensor sum = at::zeros({numel}, at::kFloat);
    for (int64_t rank = 0; rank < outer_.size(); ++rank)
      sum.add_(decode(WireFormat::int8, bytes_.narrow(0, rank * size, size), numel));
    values_ = sum.mul_(1.0 / outer_.size()).to(values_.options());
    bytes_ = at::Tensor();
  }
  complete_ = true;
  return values_;
}

at::Tensor OuterMean::finish() {
  const at::Tensor mean = peek();
  restore(at::Tensor());
  return mean;
}

void OuterMean::restore(const at::Tensor& mean) {
  values_ = mean;
  under_way_ = complete_ = mean.defined();
}

}  // namespace tessera::local_sgd
