#include "comm/hosts/hosts_transport.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>
#include <utility>

#include <fmt/format.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/base/roll_call.h"
#include "comm/base/tree_sum.h"
#include "comm/hosts/exchange_sums.h"
#include "comm/hosts/gather_over_leaders.h"
#include "comm/hosts/host_map.h"
#include "comm/hosts/sum_to_owners.h"
#include "comm/p2p/messenger.h"
#include "comm/shm/shm_kernels.h"
#include "comm/shm/shm_setup.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using Counts = std::vector<int64_t>;

// The ranks of a host find a missing one of theirs a little after the other hosts do. The other
// hosts wait for that finding, because the rank that they wait for may be waiting itself.
constexpr auto kLocalDelay = 500ms;
constexpr auto kGrace = 1000ms;

// Up to this many bytes, few messages are faster than few bytes.
constexpr size_t kSmallBytes = 64 << 10;

constexpr int64_t kStripe = 4;  // rounds that are one message of an all-gather

Counts even_counts(int64_t numel, int size) {
  Counts counts(size, numel / size);
  for (int r = 0; r < numel % size; ++r) ++counts[r];
  return counts;
}

World world_of_host(const World& world, const HostMap& map) {
  World local = world;
  const auto& members = map.members(map.host_of(world.rank));
  local.rank = map.local_rank(world.rank);
  local.size = static_cast<int>(members.size());
  local.world_ranks = world.in_world(members);
  local.same_host = true;
  local.hosts.clear();
  local.options.timeout += kLocalDelay;
  local.store =
      c10::make_intrusive<c10d::PrefixStore>(fmt::format("host{}/", members.front()), world.store);
  return local;
}

class HostsTransport : public Transport {
 public:
  HostsTransport(const World& world, HostMap map, std::unique_ptr<ShmTransport> local,
                 std::unique_ptr<Mailbox> mailbox)
      : map_(std::move(map)),
        tree_(world.wire == WireFormat::float32 ? HostSumTree(map_) : HostSumTree::by_host(map_)),
        format_(world.wire),
        rank_(world.rank),
        size_(world.size),
        host_(map_.host_of(rank_)),
        local_(std::move(local)),
        wire_(world, std::move(mailbox), kGrace),
        leaders_(*local_, wire_, map_, rank_) {}

  const char* name() const override { return wire_.name(); }
  Sent sent() const override { return wire_.sent(); }
  void set_timeout(std::chrono::milliseconds timeout) override {
    wire_.set_timeout(timeout);
    local_->set_timeout(timeout + kLocalDelay);
  }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    local_->set_stopped_timeout(timeout);
    wire_.set_silence(timeout, [this] { local_->abort(); });
  }
  void set_feedback(WireFeedback* feedback) override {
    feedback_ = feedback;
    if (feedback) feedback->begin();
  }
  void abort() noexcept override {
    wire_.abort();
    local_->abort();
  }

  std::vector<OpHeader> exchange(const OpHeader& mine) override {
    std::vector<OpHeader> headers(size_);
    run(describe(mine), [&] {
      const auto here = local_->exchange(mine);
      constexpr auto bytes = static_cast<int64_t>(sizeof(OpHeader));
      auto table = at::empty({size_ * bytes}, at::TensorOptions().dtype(at::kByte));
      int64_t before = 0;
      for (int host = 0; host < host_; ++host) before += bytes * map_.members(host).size();
      std::memcpy(static_cast<std::byte*>(table.data_ptr()) + before, here.data(),
                  here.size() * bytes);
      leaders_.gather_table(table, Counts(size_, bytes));
      const auto* from = static_cast<const OpHeader*>(table.data_ptr());
      for (int host = 0; host < map_.hosts(); ++host) {
        for (const int rank : map_.members(host)) headers[rank] = *from++;
      }
    });
    return headers;
  }

  void all_reduce(at::Tensor flat, double scale) override {
    if (format_ == WireFormat::float32 && ExchangeSums::fits(map_, tree_, flat.scalar_type()))
      return exchange_sums(flat, scale);
    if (format_ == WireFormat::float32 && flat.nbytes() * size_ <= kSmallBytes)
      return all_reduce_small(flat, scale);
    const auto counts = even_counts(flat.numel(), size_);
    const auto own = flat.narrow(0, segment_starts(counts)[rank_], counts[rank_]);
    const auto wire = wire_of(flat);
    sum_to_owners(Op::all_reduce, flat, counts, {nullptr, own, scale}, wire);
    distribute(Op::all_gather, flat, counts, wire);
  }

  void reduce(at::Tensor flat, int root) override {
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    sum_to_owners(Op::reduce, flat, counts, {nullptr, rank_ == root ? flat : flat.narrow(0, 0, 0)},
                  {});
  }

  void broadcast(at::Tensor flat, int root) override {
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    distribute(Op::broadcast, flat, counts, {});
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    distribute(Op::all_gather, flat, counts, wire_of(flat));
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, double scale,
                      const ConsumeRun* consume) override {
    sum_to_owners(Op::reduce_scatter, flat, counts,
                  {consume, flat.narrow(0, segment_starts(counts)[rank_], counts[rank_]), scale},
                  wire_of(flat));
  }

  void reduce_scatter_into(at::Tensor flat, const Counts& counts, at::Tensor output,
                           double scale) override {
    sum_to_owners(Op::reduce_scatter, flat, counts, {nullptr, output, scale}, wire_of(flat));
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    run("all_to_all", [&] {
      const auto in = segment_starts(send_counts), out = segment_starts(recv_counts);
      const auto sent = [&](int peer) { return input.narrow(0, in[peer], send_counts[peer]); };
      const auto received = [&](int peer) {
        return output.narrow(0, out[peer], recv_counts[peer]);
      };
      for (int peer = 0; peer < size_; ++peer) {
        if (map_.host_of(peer) != host_) wire_.receive(received(peer), peer);
      }
      for (int peer = 0; peer < size_; ++peer) {
        if (map_.host_of(peer) != host_) wire_.send(sent(peer), peer);
      }
      std::vector<at::Tensor> parts;
      Counts local_send, local_receive;
      for (const int peer : map_.members(host_)) {
        parts.push_back(sent(peer));
        local_send.push_back(send_counts[peer]);
        local_receive.push_back(recv_counts[peer]);
      }
      auto arrived =
          at::empty({std::accumulate(local_receive.begin(), local_receive.end(), int64_t{0})},
                    output.options());
      local_->all_to_all(arrived, at::cat(parts), local_receive, local_send);
      int64_t begin = 0;
      for (const int peer : map_.members(host_)) {
        received(peer).copy_(arrived.narrow(0, begin, recv_counts[peer]));
        begin += recv_counts[peer];
      }
      wire_.finish();
    });
  }

  at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) override {
    at::Tensor result;
    std::string problem;
    run("allocate", [&] {
      try {
        result = local_->allocate(numel, options, common);
      } catch (const UsageError& error) {
        problem = error.what();
      }
      // Either all hosts have the memory or none.
      auto failed = at::zeros({size_}, at::TensorOptions().dtype(at::kByte));
      failed[rank_] = problem.empty() ? 0 : 1;
      distribute_here(Op::all_gather, failed, Counts(size_, 1), {});
      const auto first = failed.nonzero();
      if (problem.empty() && first.numel() > 0) {
        problem = fmt::format("ProcessGroup.allocate: rank {} of {}: the host of rank {} failed",
                              rank_, size_, first[0].item<int64_t>());
      }
    });
    if (!problem.empty()) throw UsageError(problem);
    return result;
  }

  at::Tensor peer_view(const at::Tensor& allocated, int peer) const override {
    if (map_.host_of(peer) != host_) return {};
    return local_->peer_view(allocated, map_.local_rank(peer));
  }

 private:
  void all_reduce_small(at::Tensor flat, double scale) {
    run("all_reduce", [&] {
      auto parts = at::empty({size_, flat.numel()}, flat.options());
      parts[rank_].copy_(flat);
      leaders_.gather(parts.view({-1}), Counts(size_, flat.numel()));
      flat.copy_(sum_rows(parts, scale));
    });
  }

  /// For one collective of `flat`.
  Wire wire_of(const at::Tensor& flat) {
    auto* const feedback = std::exchange(feedback_, nullptr);
    if (!flat.is_floating_point()) return {};
    return {format_, feedback};
  }

  template <class Body>
  void for_other_hosts(const Body& body) const {
    for (int step = 1; step < map_.hosts(); ++step) body((host_ + step) % map_.hosts());
  }

  /// Runs one collective. A failure on this host becomes one of the group, and ends this rank's
  /// part in both levels.
  template <class Body>
  void run(const std::string& operation, const Body& body) {
    wire_.begin(operation);
    try {
      try {
        body();
      } catch (const BrokenWorldError& error) {
        if (wire_.has_failed()) throw;
        if (wire_.has_lost()) wire_.fail({}, error.what());
        std::vector<int> suspects;
        for (const int local : error.ranks()) suspects.push_back(map_.members(host_)[local]);
        if (suspects.empty() || suspects == std::vector<int>{rank_}) {
          throw BrokenWorldError(fmt::format("ProcessGroup ({}): rank {} of {} gave up in {}: {}",
                                             name(), rank_, size_, operation, error.what()),
                                 suspects);
        }
        wire_.fail(suspects, error.what(), true);
      }
    } catch (...) {
      abort();
      throw;
    }
  }

  void sum_to_owners(Op op, const at::Tensor& flat, const Counts& counts, const SumTarget& target,
                     const Wire& wire) {
    run(op_name(op), [&] {
      SumToOwners sum(wire_, map_, tree_, rank_, flat, counts, target, wire);
      int64_t rounds = 0;
      const auto is_read = [&](int segment, int64_t round, int local) {
        const int rank = map_.members(host_)[local];
        const int reader =
            map_.host_of(segment) == host_ ? segment : map_.handler(host_, segment, round);
        return reader != rank;
      };
      local_->share_windows(op, flat, counts, is_read,
                            [&](int64_t round, const ShmTransport::Window& window) {
                              sum.visit(round, window);
                              rounds = round + 1;
                            });
      sum.finish(rounds);
    });
  }

  /// The all-reduce of two hosts.
  void exchange_sums(const at::Tensor& flat, double scale) {
    run("all_reduce", [&] {
      const auto counts = even_counts(flat.numel(), static_cast<int>(map_.members(host_).size()));
      ExchangeSums sum(wire_, map_, rank_, flat, counts, scale);
      local_->share_windows(
          Op::all_reduce, flat, counts,
          [](int segment, int64_t, int local) { return segment != local; },
          [&](int64_t round, const ShmTransport::Window& window) { sum.visit(round, window); },
          [&] { sum.finish(); });
      if (!sum.reached_all()) local_->all_gather(flat, counts);
    });
  }

  void distribute(Op op, const at::Tensor& flat, const Counts& counts, const Wire& wire) {
    run(op_name(op), [&] { distribute_here(op, flat, counts, wire); });
  }

  /// Brings each rank's segment of `flat` to all ranks: once to each other host, to one of its
  /// ranks, from which the others copy it. They copy one stripe while the wire carries the next.
  void distribute_here(Op op, const at::Tensor& flat, const Counts& counts, const Wire& wire) {
    if (!wire.encodes() && flat.nbytes() <= kSmallBytes) return leaders_.gather(flat, counts);
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto starts = segment_starts(counts);
    const int64_t step = ShmTransport::window_step(counts.size(), width);
    const int64_t stripe = kStripe * step;
    const auto source = [&](int segment, int64_t round) {
      return map_.host_of(segment) == host_ ? segment
                                            : map_.handler(host_, segment, round / kStripe);
    };
    const auto in_stripes = [&](int segment, auto&& body) {
      for (int64_t i = 0; i * stripe < counts[segment]; ++i) {
        body(i, flat.narrow(0, starts[segment] + i * stripe,
                            std::min(stripe, counts[segment] - i * stripe)));
      }
    };
    struct Arriving {
      Messenger::Ticket ticket;
      at::Tensor part, encoded;  // `encoded` is undefined if values travel exactly
    };
    std::map<int64_t, std::vector<Arriving>> arriving;  // by stripe
    for (int segment = 0; segment < size_; ++segment) {
      if (map_.host_of(segment) == host_) continue;
      in_stripes(segment, [&](int64_t i, at::Tensor part) {
        if (map_.handler(host_, segment, i) != rank_) return;
        auto to = wire.encodes() ? at::empty({encoded_bytes(wire.format, part.numel())}, at::kByte)
                                 : part;
        const auto ticket = wire_.receive(to, segment, static_cast<int>(i));
        arriving[i].push_back(
            {ticket, std::move(part), wire.encodes() ? std::move(to) : at::Tensor()});
      });
    }
    in_stripes(rank_, [&](int64_t i, const at::Tensor& part) {
      const auto from = wire.encodes() ? wire.encode(part) : part;
      for_other_hosts(
          [&](int host) { wire_.send(from, map_.handler(host, rank_, i), static_cast<int>(i)); });
      if (wire.encodes()) part.copy_(decode(wire.format, from, part.numel()));
    });
    const auto make_ready = [&](int64_t round) {
      for (const auto& [ticket, part, encoded] : arriving[round / kStripe]) {
        wire_.wait(ticket);
        if (encoded.defined()) part.copy_(decode(wire.format, encoded, part.numel()));
      }
    };
    auto* const data = static_cast<std::byte*>(flat.data_ptr());
    local_->share_windows(
        op, flat, counts,
        [&](int segment, int64_t round, int local) {
          return map_.members(host_)[local] == source(segment, round);
        },
        [&](int64_t round, const ShmTransport::Window& window) {
          for (int segment = 0; segment < size_; ++segment) {
            const int64_t n = std::clamp<int64_t>(counts[segment] - round * step, 0, step);
            const int from = source(segment, round);
            if (n == 0 || from == rank_) continue;
            const auto* const theirs = window(segment, map_.local_rank(from));
            auto* const here = data + (starts[segment] + round * step) * width;
            if (theirs != here) copy_bytes(here, theirs, n * width);  // equal in common memory
          }
        },
        {}, {kStripe, make_ready});
    wire_.finish();
  }

  HostMap map_;
  HostSumTree tree_;
  WireFormat format_;
  WireFeedback* feedback_ = nullptr;
  int rank_, size_, host_;
  std::unique_ptr<ShmTransport> local_;
  Messenger wire_;
  GatherOverLeaders leaders_;
};

}  // namespace

std::unique_ptr<Transport> make_hosts_transport(const World& world, std::string& reason) {
  HostMap map(world.hosts);
  auto local = make_shm_transport(world_of_host(world, map), reason);
  // The ranks of a host agree on the reason. Each host tells the others.
  const auto broken = [&](const std::string& cause, const std::vector<int>& ranks) {
    return BrokenWorldError(
        fmt::format("ProcessGroup: rank {} of {} waited {} ms at start-up: {}", world.rank,
                    world.size, world.options.timeout.count(), cause),
        ranks);
  };
  std::map<int, Presence> reasons;
  try {
    std::replace(reason.begin(), reason.end(), '\n', ' ');
    reasons = roll_call(world.store, "hosts", world.rank, world.size, reason,
                        std::chrono::steady_clock::now() + world.options.timeout);
  } catch (const RanksMissing& missing) {
    throw broken(rank_list(missing.ranks) + " did not arrive", missing.ranks);
  } catch (const std::exception& error) {
    throw broken(compat::first_line(error.what()), {});
  }
  reason.clear();
  for (int host = 0; host < map.hosts() && reason.empty(); ++host) {
    const int first = map.members(host)[0];
    if (const auto& theirs = reasons.at(first).value; !theirs.empty())
      reason = fmt::format("on the host of rank {}: {}", first, theirs);
  }
  if (!reason.empty()) return nullptr;
  return std::make_unique<HostsTransport>(world, std::move(map), std::move(local),
                                          make_default_mailbox(world));
}

}  // namespace tessera::comm
