#include "tessera/process_group.h"

#include <cstdlib>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <xxhash.h>

#include "comm/group/argument_checks.h"
#include "comm/group/process_group_impl.h"
#include "comm/rendezvous/local_place.h"
#include "tessera/detail/resolved.h"
#include "tessera/error.h"

namespace tessera {

using comm::Op;
using comm::OpHeader;
using comm::Transport;
using Headers = std::vector<OpHeader>;

uint64_t CommStats::payload_received() const {
  return all_reduce.bytes_received + reduce.bytes_received + broadcast.bytes_received +
         all_gather.bytes_received + reduce_scatter.bytes_received + all_to_all.bytes_received;
}

uint64_t CommStats::payload_sent() const {
  return all_reduce.bytes_sent + reduce.bytes_sent + broadcast.bytes_sent + all_gather.bytes_sent +
         reduce_scatter.bytes_sent + all_to_all.bytes_sent;
}

uint64_t CommStats::calls() const {
  return all_reduce.calls + reduce.calls + broadcast.calls + all_gather.calls +
         reduce_scatter.calls + all_to_all.calls + barrier.calls + bytes.calls;
}

namespace {

void check_tensor(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor) {
  require(tensor.defined(), impl, method, "the tensor is undefined; expected a dense tensor");
  require(tensor.layout() == at::kStrided, impl, method,
          "the tensor is sparse; expected a dense tensor");
  if (impl.alone() || tensor.device().is_cpu()) return;
  const auto device = impl.transport->device_type();
  require(tensor.device().type() == device, impl, method,
          fmt::format("the tensor is on {}, but backend {} moves CPU tensors{}",
                      tensor.device().str(), impl.transport->name(),
                      device == at::kCPU ? "" : " and tensors on " + at::Device(device).str()));
}

void check_sum(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor) {
  check_tensor(impl, method, tensor);
  require(
      tensor.scalar_type() != at::kBool && !tensor.is_complex(), impl, method,
      fmt::format("sums of dtype {} are not defined; expected a floating-point or integer dtype",
                  c10::toString(tensor.scalar_type())));
}

void check_counts(const ProcessGroup::Impl& impl, const char* method, const char* name,
                  const std::vector<int64_t>& counts, const at::Tensor& tensor) {
  require(static_cast<int>(counts.size()) == impl.world.size, impl, method,
          fmt::format("{} has {} entries; expected one for each of {} ranks", name, counts.size(),
                      impl.world.size));
  int64_t total = 0;
  for (const auto count : counts) {
    require(count >= 0, impl, method, fmt::format("{} has the negative entry {}", name, count));
    total += count;
  }
  require(total == tensor.numel(), impl, method,
          fmt::format("{} add up to {}; expected the tensor's {} elements", name, total,
                      tensor.numel()));
  require(tensor.dim() == 1 && tensor.is_contiguous() && detail::is_resolved(tensor), impl, method,
          "the tensor must be one-dimensional and contiguous, and no conjugate or negative view");
}

OpHeader header_of(Op op, const at::Tensor& tensor, int root = -1) {
  OpHeader header;
  header.op = op;
  header.dtype = static_cast<int8_t>(tensor.scalar_type());
  header.numel = tensor.numel();
  header.root = root;
  header.on_device = !tensor.device().is_cpu();
  return header;
}

OpHeader header_of(Op op, const at::Tensor& tensor, const std::vector<int64_t>& counts) {
  auto header = header_of(op, tensor);
  header.detail = XXH64(counts.data(), counts.size() * sizeof(int64_t), 0);
  return header;
}

/// `tensor` without the dimensions along which it was expanded. Each element of memory then appears
/// once, so the tensor can be written.
at::Tensor without_repeats(at::Tensor tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.stride(d) == 0 && tensor.size(d) > 1) tensor = tensor.narrow(d, 0, 1);
  }
  return tensor;
}

/// Calls `body` with a flat contiguous view or, if there is none, a copy of `tensor`. If
/// `write_back`, then copies the copy back.
template <class Body>
void with_flat(const at::Tensor& tensor, bool write_back, Body&& body) {
  auto flat = tensor.detach();
  if (flat.is_contiguous() && detail::is_resolved(flat)) return body(flat.view({-1}));
  flat = detail::resolved(flat).contiguous();
  body(flat.view({-1}));
  if (write_back) tensor.detach().copy_(flat);
}

uint64_t bytes_of(const at::Tensor& tensor) {
  return static_cast<uint64_t>(tensor.numel()) * tensor.element_size();
}

}  // namespace

ProcessGroup::ProcessGroup() : impl_(Impl::make()) {}
ProcessGroup::ProcessGroup(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

int ProcessGroup::rank() const { return impl_->world.rank; }
int ProcessGroup::size() const { return impl_->world.size; }
const std::vector<int>& ProcessGroup::world_ranks() const { return impl_->world.world_ranks; }
std::chrono::milliseconds ProcessGroup::timeout() const { return impl_->world.options.timeout; }
std::string ProcessGroup::backend_name() const {
  return impl_->alone() ? "self" : impl_->transport->name();
}
bool ProcessGroup::same_host() const { return impl_->world.same_host; }

bool ProcessGroup::messages_between_hosts() const {
  const auto backend = backend_name();
  return !same_host() && (backend == "tcp" || backend == "gloo");
}

int ProcessGroup::local_rank() const {
  return comm::local_place(impl_->world, [](const char* name) { return std::getenv(name); }).rank;
}
int ProcessGroup::local_size() const {
  return comm::local_place(impl_->world, [](const char* name) { return std::getenv(name); }).size;
}
CommStats ProcessGroup::stats() const { return impl_->traffic().snapshot(); }
void ProcessGroup::reset_stats() { impl_->traffic().reset(); }

void ProcessGroup::set_timeout(std::chrono::milliseconds timeout) {
  const auto former = impl_->world.options.timeout;
  set_timeout(timeout, timeout);
  for (auto& child : impl_->descendants()) {
    if (child->world.options.timeout == former) ProcessGroup(child).set_timeout(timeout, timeout);
  }
}

void ProcessGroup::set_timeout(std::chrono::milliseconds timeout,
                               std::chrono::milliseconds stopped) {
  for (const auto value : {timeout, stopped}) {
    require(value.count() > 0, *impl_, "set_timeout",
            fmt::format("the time-out is {} ms; expected a positive one", value.count()));
  }
  impl_->world.options.timeout = timeout;
  if (impl_->transport) {
    impl_->transport->set_timeout(timeout);
    impl_->transport->set_stopped_timeout(stopped);
  }
}

namespace {

/// Values that travel encoded between hosts.
void check_wire(const ProcessGroup::Impl& impl, const char* method, const at::Tensor& tensor) {
  require(impl.world.wire == WireFormat::float32 || tensor.scalar_type() != at::kDouble, impl,
          method,
          fmt::format("dtype Double cannot travel as {}; expected float32, bfloat16 or float16",
                      to_string(impl.world.wire)));
}

/// A collective on one tensor, to be run blocking or asynchronously.
struct Call {
  OpHeader header;
  ProcessGroup::Impl::Body body;
  std::vector<at::Tensor> tensors;  ///< All that `body` uses.
};

Call all_reduce_call(ProcessGroup::Impl& impl, const at::Tensor& tensor, double scale) {
  check_sum(impl, "all_reduce", tensor);
  check_wire(impl, "all_reduce", tensor);
  const uint64_t size = impl.world.size, moved = 2 * bytes_of(tensor) * (size - 1) / size;
  impl.count(&CommStats::all_reduce, moved, moved);
  if (impl.alone() && scale != 1) tensor.detach().mul_(scale);
  return {header_of(Op::all_reduce, tensor),
          [tensor, scale](Transport& transport, const Headers&) {
            with_flat(tensor, true, [&](at::Tensor flat) {
              if (flat.numel()) transport.all_reduce(flat, scale);
            });
          },
          {tensor}};
}

Call reduce_call(ProcessGroup::Impl& impl, const at::Tensor& tensor, int root) {
  check_sum(impl, "reduce", tensor);
  check_root(impl, "reduce", root);
  const bool owner = impl.world.rank == root;
  impl.count(&CommStats::reduce, owner ? 0 : bytes_of(tensor),
             owner ? bytes_of(tensor) * (impl.world.size - 1) : 0);
  return {header_of(Op::reduce, tensor, root),
          [tensor, root, owner](Transport& transport, const Headers&) {
            with_flat(tensor, owner, [&](at::Tensor flat) {
              if (flat.numel()) transport.reduce(flat, root);
            });
          },
          {tensor}};
}

Call broadcast_call(ProcessGroup::Impl& impl, at::Tensor tensor, int root) {
  check_tensor(impl, "broadcast", tensor);
  tensor = without_repeats(std::move(tensor));
  check_root(impl, "broadcast", root);
  const bool owner = impl.world.rank == root;
  impl.count(&CommStats::broadcast, owner ? bytes_of(tensor) * (impl.world.size - 1) : 0,
             owner ? 0 : bytes_of(tensor));
  return {header_of(Op::broadcast, tensor, root),
          [tensor, root, owner](Transport& transport, const Headers&) {
            with_flat(tensor, !owner, [&](at::Tensor flat) {
              if (flat.numel()) transport.broadcast(flat, root);
            });
          },
          {tensor}};
}

Call all_gather_call(ProcessGroup::Impl& impl, const at::Tensor& flat,
                     const std::vector<int64_t>& counts) {
  check_tensor(impl, "all_gather", flat);
  check_wire(impl, "all_gather", flat);
  check_counts(impl, "all_gather", "counts", counts, flat);
  const uint64_t own = counts[impl.world.rank] * flat.element_size();
  impl.count(&CommStats::all_gather, own * (impl.world.size - 1), bytes_of(flat) - own);
  return {header_of(Op::all_gather, flat, counts),
          [flat = flat.detach(), counts](Transport& transport, const Headers&) {
            if (flat.numel()) transport.all_gather(flat, counts);
          },
          {flat}};
}

Call reduce_scatter_call(ProcessGroup::Impl& impl, const at::Tensor& flat,
                         const std::vector<int64_t>& counts, double scale,
                         ProcessGroup::ConsumeRun consume) {
  check_sum(impl, "reduce_scatter", flat);
  check_wire(impl, "reduce_scatter", flat);
  check_counts(impl, "reduce_scatter", "counts", counts, flat);
  const uint64_t own = counts[impl.world.rank] * flat.element_size();
  impl.count(&CommStats::reduce_scatter, bytes_of(flat) - own, own * (impl.world.size - 1));
  return {header_of(Op::reduce_scatter, flat, counts),
          [flat = flat.detach(), counts, scale, consume = std::move(consume)](Transport& transport,
                                                                              const Headers&) {
            if (flat.numel())
              transport.reduce_scatter(flat, counts, scale, consume ? &consume : nullptr);
          },
          {flat}};
}

/// The call's body with the error feedback of this thread's scope, if there is one.
ProcessGroup::Impl::Body body_of(const ProcessGroup::Impl& impl, Call call) {
  auto* const feedback = comm::WireFeedbackScope::current();
  if (feedback == nullptr || impl.world.wire == WireFormat::float32) return std::move(call.body);
  return [feedback, body = std::move(call.body)](Transport& transport, const Headers& headers) {
    transport.set_feedback(feedback);
    body(transport, headers);
    transport.set_feedback(nullptr);
  };
}

Work submit(ProcessGroup::Impl& impl, Call call, const std::string& tag) {
  if (impl.alone()) return {};
  const auto header = call.header;
  const auto tensors = call.tensors;
  return impl.submit(header, body_of(impl, std::move(call)), tag, tensors);
}

void run(ProcessGroup::Impl& impl, Call call, const std::string& tag) {
  const auto header = call.header;
  const auto tensors = call.tensors;
  if (!impl.alone()) impl.run(header, body_of(impl, std::move(call)), tag, tensors);
}

/// Ranks that scale differently disagree.
std::string with_scale(double scale, const std::string& tag) {
  return scale == 1 ? tag : fmt::format("scale {}{}{}", scale, tag.empty() ? "" : ", ", tag);
}

}  // namespace

void ProcessGroup::all_reduce(at::Tensor tensor, double scale, const std::string& tag) {
  run(*impl_, all_reduce_call(*impl_, tensor, scale), with_scale(scale, tag));
}

Work ProcessGroup::all_reduce_async(at::Tensor tensor, double scale, const std::string& tag) {
  return submit(*impl_, all_reduce_call(*impl_, tensor, scale), with_scale(scale, tag));
}

void ProcessGroup::reduce(at::Tensor tensor, int root, const std::string& tag) {
  run(*impl_, reduce_call(*impl_, tensor, root), tag);
}

void ProcessGroup::broadcast(at::Tensor tensor, int root, const std::string& tag) {
  run(*impl_, broadcast_call(*impl_, tensor, root), tag);
}

Work ProcessGroup::broadcast_async(at::Tensor tensor, int root, const std::string& tag) {
  return submit(*impl_, broadcast_call(*impl_, tensor, root), tag);
}

void ProcessGroup::broadcast(std::vector<at::Tensor> tensors, int root, const std::string& tag) {
  constexpr uint64_t kPackBytes = 25 << 20;
  for (const auto& tensor : tensors) check_tensor(*impl_, "broadcast", tensor);
  check_root(*impl_, "broadcast", root);
  if (impl_->alone()) return;
  at::NoGradGuard no_grad;
  for (auto& tensor : tensors) tensor = without_repeats(tensor.detach());
  size_t begin = 0;
  while (begin < tensors.size()) {
    size_t end = begin;
    uint64_t bytes = 0;
    std::vector<at::Tensor> parts;
    while (end < tensors.size() && tensors[end].options().type_equal(tensors[begin].options()) &&
           (end == begin || bytes + bytes_of(tensors[end]) <= kPackBytes)) {
      bytes += bytes_of(tensors[end]);
      parts.push_back(tensors[end++].detach().reshape({-1}));
    }
    auto pack = parts.size() == 1 && tensors[begin].is_contiguous() ? parts[0] : at::cat(parts);
    broadcast(pack, root, tag);
    if (pack.data_ptr() != tensors[begin].data_ptr()) {
      int64_t offset = 0;
      for (; begin < end; ++begin) {
        const auto& tensor = tensors[begin];
        if (rank() == root) {
          tensor.unsafeGetTensorImpl()->bump_version();  // all ranks see a write, or none does
          continue;
        }
        tensor.copy_(pack.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
        offset += tensor.numel();
      }
    }
    begin = end;
  }
}

void ProcessGroup::all_gather(at::Tensor flat, const std::vector<int64_t>& counts,
                              const std::string& tag) {
  run(*impl_, all_gather_call(*impl_, flat, counts), tag);
}

Work ProcessGroup::all_gather_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                    const std::string& tag) {
  return submit(*impl_, all_gather_call(*impl_, flat, counts), tag);
}

at::Tensor ProcessGroup::all_gather(at::Tensor tensor) {
  check_tensor(*impl_, "all_gather", tensor);
  const auto mine = tensor.detach().reshape({-1});
  if (impl_->alone()) {
    impl_->count(&CommStats::all_gather, 0, 0);
    return mine.clone();
  }
  auto header = header_of(Op::all_gather, mine);
  header.free_numel = 1;
  at::Tensor all;
  const auto body = [&](Transport& transport, const Headers& headers) {
    std::vector<int64_t> counts;
    for (const auto& h : headers) counts.push_back(h.numel);
    const int64_t total = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const int64_t before = std::accumulate(counts.begin(), counts.begin() + rank(), int64_t{0});
    all = at::empty({total}, mine.options());
    all.narrow(0, before, mine.numel()).copy_(mine);
    if (total) transport.all_gather(all, counts);
  };
  impl_->run(header, body, "", {mine});
  impl_->count(&CommStats::all_gather, bytes_of(mine) * (size() - 1),
               bytes_of(all) - bytes_of(mine));
  return all;
}

void ProcessGroup::reduce_scatter(at::Tensor flat, const std::vector<int64_t>& counts,
                                  const std::string& tag) {
  run(*impl_, reduce_scatter_call(*impl_, flat, counts, 1, nullptr), tag);
}

void ProcessGroup::reduce_scatter_each(at::Tensor flat, const std::vector<int64_t>& counts,
                                       const ConsumeRun& consume, double scale,
                                       const std::string& tag) {
  auto call = reduce_scatter_call(*impl_, flat, counts, scale, consume);
  if (!impl_->alone()) return run(*impl_, std::move(call), tag);
  if (flat.numel()) consume(0, scale == 1 ? flat.detach() : flat.detach().mul(scale));
}

Work ProcessGroup::reduce_scatter_each_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                             ConsumeRun consume, double scale,
                                             const std::string& tag) {
  if (impl_->alone()) {
    reduce_scatter_each(flat, counts, consume, scale);
    return {};
  }
  return submit(*impl_, reduce_scatter_call(*impl_, flat, counts, scale, std::move(consume)), tag);
}

Work ProcessGroup::reduce_scatter_into_async(at::Tensor flat, const std::vector<int64_t>& counts,
                                             at::Tensor output, double scale,
                                             const std::string& tag) {
  auto call = reduce_scatter_call(*impl_, flat, counts, 1, nullptr);
  const bool fits = output.dim() == 1 && output.is_contiguous() && detail::is_resolved(output) &&
                    output.numel() == counts[rank()] &&
                    output.scalar_type() == flat.scalar_type() && output.device() == flat.device();
  require(
      fits, *impl_, "reduce_scatter",
      fmt::format("output is {} of {} elements; expected 1-D contiguous {} of {} elements on {}",
                  c10::toString(output.scalar_type()), output.numel(),
                  c10::toString(flat.scalar_type()), counts[rank()], flat.device().str()));
  if (impl_->alone()) {
    at::NoGradGuard no_grad;
    output.copy_(flat);
    if (scale != 1) output.mul_(scale);
    return {};
  }
  call.body = [flat = flat.detach(), counts, output = output.detach(), scale](Transport& transport,
                                                                              const Headers&) {
    if (flat.numel()) transport.reduce_scatter_into(flat, counts, output, scale);
  };
  call.tensors.push_back(output);
  return submit(*impl_, std::move(call), with_scale(scale, tag));
}

void ProcessGroup::all_to_all(at::Tensor output, at::Tensor input,
                              const std::vector<int64_t>& recv_counts,
                              const std::vector<int64_t>& send_counts, const std::string& tag) {
  check_tensor(*impl_, "all_to_all", output);
  check_tensor(*impl_, "all_to_all", input);
  check_counts(*impl_, "all_to_all", "recv_counts", recv_counts, output);
  check_counts(*impl_, "all_to_all", "send_counts", send_counts, input);
  require(output.scalar_type() == input.scalar_type(), *impl_, "all_to_all",
          "output and input have different dtypes");
  const uint64_t width = input.element_size();
  impl_->count(&CommStats::all_to_all, bytes_of(input) - width * send_counts[rank()],
               bytes_of(output) - width * recv_counts[rank()]);
  if (impl_->alone()) {
    output.detach().copy_(input.detach());
    return;
  }
  // The count that r sends to s must be the count that s expects from r: every rank sees the whole
  // table before data moves.
  std::string mine(reinterpret_cast<const char*>(recv_counts.data()),
                   recv_counts.size() * sizeof(int64_t));
  mine.append(reinterpret_cast<const char*>(send_counts.data()),
              send_counts.size() * sizeof(int64_t));
  const auto table = all_gather_bytes(mine, tag.empty() ? "all_to_all" : tag);
  const auto entry = [&](int r, int index) {
    int64_t value;
    std::memcpy(&value, table[r].data() + index * sizeof(int64_t), sizeof(value));
    return value;
  };
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      require(entry(from, size() + to) == entry(to, from), *impl_, "all_to_all",
              fmt::format("rank {} sends {} elements to rank {}, which expects {}", from,
                          entry(from, size() + to), to, entry(to, from)));
    }
  }
  auto header = header_of(Op::all_to_all, input);
  header.free_numel = 1;
  impl_->run(header,
             [&](Transport& transport, const Headers&) {
               transport.all_to_all(output.detach(), input.detach(), recv_counts, send_counts);
             },
             tag, {output, input});
}

void ProcessGroup::barrier(const std::string& tag) {
  impl_->count(&CommStats::barrier, 0, 0);
  if (impl_->alone()) return;
  OpHeader header;
  header.op = Op::barrier;
  header.free_numel = 1;  // forces the exchange of headers, which is the barrier
  impl_->run(
      header, [](Transport&, const Headers&) {}, tag);
}

}  // namespace tessera
