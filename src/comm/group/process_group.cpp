#include "tessera/process_group.h"

#include <cstdlib>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "comm/group/argument_checks.h"
#include "comm/group/calls.h"
#include "comm/rendezvous/local_place.h"

namespace tessera {

using comm::Headers;
using comm::Mode;
using comm::Op;
using comm::OpHeader;
using comm::Transport;

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
  return !same_host() && (backend == "tcp" || backend == "gloo" || backend == "mpi");
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
  for (auto& child : impl_->descendants())
    if (child->world.options.timeout == former) ProcessGroup(child).set_timeout(timeout, timeout);
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

void ProcessGroup::all_reduce(at::Tensor tensor, double scale, const std::string& tag) {
  impl_->issue(all_reduce_call(*impl_, tensor, scale, tag));
}

Work ProcessGroup::all_reduce_async(at::Tensor tensor, double scale, const std::string& tag) {
  return impl_->issue(all_reduce_call(*impl_, tensor, scale, tag), Mode::work);
}

void ProcessGroup::reduce(at::Tensor tensor, int root, const std::string& tag) {
  impl_->issue(reduce_call(*impl_, tensor, root, tag));
}

void ProcessGroup::broadcast(at::Tensor tensor, int root, const std::string& tag) {
  impl_->issue(broadcast_call(*impl_, tensor, root, tag));
}

Work ProcessGroup::broadcast_async(at::Tensor tensor, int root, const std::string& tag) {
  return impl_->issue(broadcast_call(*impl_, tensor, root, tag), Mode::work);
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

void ProcessGroup::all_gather(at::Tensor flat, const Counts& counts, const std::string& tag) {
  impl_->issue(all_gather_call(*impl_, flat, counts, tag));
}

Work ProcessGroup::all_gather_async(at::Tensor flat, const Counts& counts, const std::string& tag) {
  return impl_->issue(all_gather_call(*impl_, flat, counts, tag), Mode::work);
}

at::Tensor ProcessGroup::all_gather(at::Tensor tensor) {
  check_tensor(*impl_, "all_gather", tensor);
  check_wire(*impl_, "all_gather", tensor);
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
  impl_->issue({header, body, {mine}});
  impl_->count(&CommStats::all_gather, bytes_of(mine) * (size() - 1),
               bytes_of(all) - bytes_of(mine));
  return all;
}

void ProcessGroup::reduce_scatter(at::Tensor flat, const Counts& counts, const std::string& tag) {
  impl_->issue(reduce_scatter_call(*impl_, flat, counts, 1, nullptr, tag));
}

void ProcessGroup::reduce_scatter_each(at::Tensor flat, const Counts& counts,
                                       const ConsumeRun& consume, double scale,
                                       const std::string& tag) {
  impl_->issue(reduce_scatter_call(*impl_, flat, counts, scale, consume, tag));
  if (impl_->alone() && flat.numel())
    consume(0, scale == 1 ? flat.detach() : flat.detach().mul(scale));
}

Work ProcessGroup::reduce_scatter_each_async(at::Tensor flat, const Counts& counts,
                                             ConsumeRun consume, double scale,
                                             const std::string& tag) {
  if (impl_->alone()) {
    reduce_scatter_each(flat, counts, consume, scale);
    return {};
  }
  return impl_->issue(reduce_scatter_call(*impl_, flat, counts, scale, std::move(consume), tag),
                      Mode::work);
}

Work ProcessGroup::reduce_scatter_into_async(at::Tensor flat, const Counts& counts,
                                             at::Tensor output, double scale,
                                             const std::string& tag) {
  auto call = reduce_scatter_into_call(*impl_, flat, counts, output, scale, tag);
  if (!impl_->alone()) return impl_->issue(std::move(call), Mode::work);
  at::NoGradGuard no_grad;
  output.copy_(flat);
  if (scale != 1) output.mul_(scale);
  return {};
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
  check_apart(*impl_, "all_to_all", output, input);
  const uint64_t width = input.element_size();
  impl_->count(&CommStats::all_to_all, bytes_of(input) - width * send_counts[rank()],
               bytes_of(output) - width * recv_counts[rank()]);
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
  if (impl_->alone()) {
    output.detach().copy_(input.detach());
    return;
  }
  auto header = header_of(Op::all_to_all, input);
  header.free_numel = 1;
  const auto body = [&](Transport& transport, const Headers&) {
    transport.all_to_all(output.detach(), input.detach(), recv_counts, send_counts);
  };
  impl_->issue({header, body, {output, input}, tag});
}

void ProcessGroup::barrier(const std::string& tag) {
  impl_->count(&CommStats::barrier, 0, 0);
  if (impl_->alone()) return;
  OpHeader header;
  header.op = Op::barrier;
  header.free_numel = 1;  // forces the exchange of headers, which is the barrier
  impl_->issue({header, [](Transport&, const Headers&) {}, {}, tag});
}

namespace {

at::Tensor allocate_in(ProcessGroup::Impl& impl, const char* op, int64_t numel,
                       at::TensorOptions options, bool common) {
  require(numel >= 0, impl, op, fmt::format("numel is {}; expected 0 or more", numel));
  OpHeader header;
  header.op = Op::allocate;
  header.numel = numel;
  header.dtype = static_cast<int8_t>(c10::typeMetaToScalarType(options.dtype()));
  header.detail = common;
  at::Tensor result;
  const auto body = [&](Transport& transport, const Headers&) {
    if (numel && options.device().is_cpu()) result = transport.allocate(numel, options, common);
  };
  impl.issue({header, body});
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
