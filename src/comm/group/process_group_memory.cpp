// Members of ProcessGroup that allocate memory that other ranks can read.
#include <fmt/format.h>

#include "comm/group/argument_checks.h"
#include "comm/group/process_group_impl.h"
#include "tessera/process_group.h"

namespace tessera {

using comm::Op;
using comm::OpHeader;
using comm::Transport;
using Headers = std::vector<OpHeader>;

namespace {

at::Tensor allocate_in(ProcessGroup::Impl& impl, const char* op, int64_t numel,
                       at::TensorOptions options, bool common) {
  require(numel >= 0, impl, op, fmt::format("numel is {}; expected 0 or more", numel));
  if (impl.alone()) return {};
  OpHeader header;
  header.op = Op::allocate;
  header.numel = numel;
  header.dtype = static_cast<int8_t>(c10::typeMetaToScalarType(options.dtype()));
  header.detail = common;
  at::Tensor result;
  impl.run(header, [&](Transport& transport, const Headers&) {
    if (numel && options.device().is_cpu()) result = transport.allocate(numel, options, common);
  });
  return result;
}

}  // namespace

at::Tensor ProcessGroup::allocate(int64_t numel, at::TensorOptions options) {
  const auto result = allocate_in(*impl_, "allocate", numel, options, false);
  return result.defined() ? result : at::zeros({numel}, options);
}

at::Tensor ProcessGroup::allocate_common(int64_t numel, at::TensorOptions options) {
  return allocate_in(*impl_, "allocate_common", numel, options, true);
}

at::Tensor ProcessGroup::peer_view(const at::Tensor& allocated, int peer) const {
  check_root(*impl_, "peer_view", peer);
  if (impl_->alone() || peer == rank()) return allocated;
  return impl_->transport->peer_view(allocated, peer);
}

}  // namespace tessera
