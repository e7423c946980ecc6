#include "comm/group/calls.h"

#include <fmt/format.h>
#include <xxhash.h>

#include "comm/group/argument_checks.h"
#include "tessera/detail/resolved.h"

namespace tessera {

using comm::Call;
using comm::Headers;
using comm::Op;
using comm::OpHeader;
using comm::Transport;

namespace {

OpHeader header_of_segments(Op op, const at::Tensor& flat, const Counts& counts) {
  auto header = header_of(op, flat);
  header.detail = XXH64(counts.data(), counts.size() * sizeof(int64_t), 0);
  return header;
}

/// A flat contiguous view or, if there is none, a copy of a tensor.
class Flat {
 public:
  explicit Flat(const at::Tensor& tensor) : tensor_(tensor.detach()), flat_(tensor_) {
    copied_ = !flat_.is_contiguous() || !detail::is_resolved(flat_);
    if (copied_) flat_ = detail::resolved(flat_).contiguous();
  }
  at::Tensor view() const { return flat_.view({-1}); }
  /// The tensor gets the values of a copy.
  void write_back() const {
    if (copied_) tensor_.copy_(flat_);
  }

 private:
  at::Tensor tensor_, flat_;
  bool copied_;
};

/// Complex numbers are moved and summed as pairs of real ones.
at::Tensor pairs(const at::Tensor& tensor) { return at::view_as_real(tensor.detach()); }

/// A call that gives its result in `dense`, which then goes to `view` of other memory.
Call with_copy_to(const ProcessGroup::Impl& impl, const at::Tensor& view, const at::Tensor& dense,
                  Call call) {
  const auto copy = [view = view.detach(), dense] { view.copy_(dense); };
  if (impl.alone()) copy();
  call.body = [body = std::move(call.body), copy](Transport& transport, const Headers& headers) {
    body(transport, headers);
    copy();
  };
  call.tensors.push_back(view);
  return call;
}

Counts doubled(Counts counts) {
  for (auto& count : counts) count *= 2;
  return counts;
}

/// Ranks that scale differently disagree.
std::string with_scale(double scale, const std::string& tag) {
  return scale == 1 ? tag : fmt::format("scale {}{}{}", scale, tag.empty() ? "" : ", ", tag);
}

/// The scope of this thread has the error feedback.
Call call_of(const ProcessGroup::Impl& impl, OpHeader header, const at::Tensor& tensor,
             Call::Body body, std::string tag) {
  auto feedback =
      impl.world.wire == WireFormat::float32 ? nullptr : comm::WireFeedbackScope::current();
  return {header, std::move(body), {tensor}, std::move(tag), std::move(feedback)};
}

}  // namespace

OpHeader header_of(Op op, const at::Tensor& tensor, int root) {
  OpHeader header;
  header.op = op;
  header.dtype = static_cast<int8_t>(tensor.scalar_type());
  header.numel = tensor.numel();
  header.root = root;
  header.on_device = !tensor.device().is_cpu();
  return header;
}

at::Tensor without_repeats(at::Tensor tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d)
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  return tensor;
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

Call all_reduce_call(ProcessGroup::Impl& impl, at::Tensor tensor, double scale,
                     const std::string& tag) {
  check_tensor(impl, "all_reduce", tensor);
  if (tensor.is_conj()) {
    const at::Tensor dense = detail::resolved(tensor.detach());
    return with_copy_to(impl, tensor, dense, all_reduce_call(impl, dense, scale, tag));
  }
  if (tensor.is_complex()) return all_reduce_call(impl, pairs(tensor), scale, tag);
  tensor = without_repeats(std::move(tensor));
  check_sum(impl, "all_reduce", tensor, scale);
  check_wire(impl, "all_reduce", tensor);
  const uint64_t size = impl.world.size, moved = 2 * bytes_of(tensor) * (size - 1) / size;
  impl.count(&CommStats::all_reduce, moved, moved);
  if (impl.alone() && scale != 1) tensor.detach().mul_(scale);
  const auto body = [tensor, scale](Transport& transport, const Headers&) {
    const Flat flat(tensor);
    if (tensor.numel()) transport.all_reduce(flat.view(), scale);
    flat.write_back();
  };
  return call_of(impl, header_of(Op::all_reduce, tensor), tensor, body, with_scale(scale, tag));
}

Call reduce_call(ProcessGroup::Impl& impl, at::Tensor tensor, int root, const std::string& tag) {
  check_tensor(impl, "reduce", tensor);
  if (tensor.is_conj()) {
    const at::Tensor dense = detail::resolved(tensor.detach());
    return with_copy_to(impl, tensor, dense, reduce_call(impl, dense, root, tag));
  }
  if (tensor.is_complex()) return reduce_call(impl, pairs(tensor), root, tag);
  tensor = without_repeats(std::move(tensor));
  check_sum(impl, "reduce", tensor);
  check_root(impl, "reduce", root);
  const bool owner = impl.world.rank == root;
  impl.count(&CommStats::reduce, owner ? 0 : bytes_of(tensor),
             owner ? bytes_of(tensor) * (impl.world.size - 1) : 0);
  const auto body = [tensor, root, owner](Transport& transport, const Headers&) {
    const Flat flat(tensor);
    if (tensor.numel()) transport.reduce(flat.view(), root);
    if (owner) flat.write_back();
  };
  return call_of(impl, header_of(Op::reduce, tensor, root), tensor, body, tag);
}

Call broadcast_call(ProcessGroup::Impl& impl, at::Tensor tensor, int root, const std::string& tag) {
  check_tensor(impl, "broadcast", tensor);
  tensor = without_repeats(std::move(tensor));
  check_root(impl, "broadcast", root);
  const bool owner = impl.world.rank == root;
  impl.count(&CommStats::broadcast, owner ? bytes_of(tensor) * (impl.world.size - 1) : 0,
             owner ? 0 : bytes_of(tensor));
  const auto body = [tensor, root, owner](Transport& transport, const Headers&) {
    const Flat flat(tensor);
    if (tensor.numel()) transport.broadcast(flat.view(), root);
    if (!owner) flat.write_back();
  };
  return call_of(impl, header_of(Op::broadcast, tensor, root), tensor, body, tag);
}

Call all_gather_call(ProcessGroup::Impl& impl, const at::Tensor& flat, const Counts& counts,
                     const std::string& tag) {
  check_tensor(impl, "all_gather", flat);
  check_wire(impl, "all_gather", flat);
  check_counts(impl, "all_gather", "counts", counts, flat);
  if (flat.is_complex()) return all_gather_call(impl, pairs(flat).view({-1}), doubled(counts), tag);
  const uint64_t own = counts[impl.world.rank] * flat.element_size();
  impl.count(&CommStats::all_gather, own * (impl.world.size - 1), bytes_of(flat) - own);
  const auto body = [flat = flat.detach(), counts](Transport& transport, const Headers&) {
    if (flat.numel()) transport.all_gather(flat, counts);
  };
  return call_of(impl, header_of_segments(Op::all_gather, flat, counts), flat, body, tag);
}

Call reduce_scatter_call(ProcessGroup::Impl& impl, const at::Tensor& flat, const Counts& counts,
                         double scale, ProcessGroup::ConsumeRun consume, const std::string& tag) {
  check_tensor(impl, "reduce_scatter", flat);
  check_wire(impl, "reduce_scatter", flat);
  check_counts(impl, "reduce_scatter", "counts", counts, flat);
  if (flat.is_complex()) {
    // Runs begin and end at even numbers of elements, because ranges and windows do.
    if (consume) {
      consume = [consume](int64_t offset, const at::Tensor& run) {
        consume(offset / 2, at::view_as_complex(run.view({-1, 2})));
      };
    }
    return reduce_scatter_call(impl, pairs(flat).view({-1}), doubled(counts), scale,
                               std::move(consume), tag);
  }
  check_sum(impl, "reduce_scatter", flat, scale);
  const uint64_t own = counts[impl.world.rank] * flat.element_size();
  impl.count(&CommStats::reduce_scatter, bytes_of(flat) - own, own * (impl.world.size - 1));
  auto body = [flat = flat.detach(), counts, scale, consume = std::move(consume)](
                  Transport& transport, const Headers&) {
    if (flat.numel()) transport.reduce_scatter(flat, counts, {scale, consume ? &consume : nullptr});
  };
  return call_of(impl, header_of_segments(Op::reduce_scatter, flat, counts), flat, std::move(body),
                 tag);
}

Call reduce_scatter_into_call(ProcessGroup::Impl& impl, const at::Tensor& flat,
                              const Counts& counts, const at::Tensor& output, double scale,
                              const std::string& tag) {
  if (flat.defined() && flat.is_complex() && output.is_complex() && output.dim() == 1) {
    check_counts(impl, "reduce_scatter", "counts", counts, flat);
    return reduce_scatter_into_call(impl, pairs(flat).view({-1}), doubled(counts),
                                    pairs(output).view({-1}), scale, tag);
  }
  auto call = reduce_scatter_call(impl, flat, counts, 1, nullptr, with_scale(scale, tag));
  check_sum(impl, "reduce_scatter", flat, scale);
  const int64_t own = counts[impl.world.rank];
  const bool fits = output.dim() == 1 && output.is_contiguous() && detail::is_resolved(output) &&
                    output.numel() == own && output.scalar_type() == flat.scalar_type() &&
                    output.device() == flat.device();
  require(
      fits, impl, "reduce_scatter",
      fmt::format("output is {} of {} elements; expected 1-D contiguous {} of {} elements on {}",
                  c10::toString(output.scalar_type()), output.numel(),
                  c10::toString(flat.scalar_type()), own, flat.device().str()));
  check_apart(impl, "reduce_scatter", output, flat);
  call.body = [flat = flat.detach(), counts, output = output.detach(), scale](Transport& transport,
                                                                              const Headers&) {
    if (flat.numel()) transport.reduce_scatter(flat, counts, {scale, nullptr, output});
  };
  call.tensors.push_back(output);
  return call;
}

}  // namespace tessera
