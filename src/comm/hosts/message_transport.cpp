#include "comm/hosts/message_transport.h"

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
#include "comm/hosts/distribution.h"
#include "comm/hosts/exchange_sums.h"
#include "comm/hosts/gather_over_leaders.h"
#include "comm/hosts/sum_to_owners.h"
#include "comm/shm/shm_setup.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

// If a rank is missing, the other hosts notice a little before the ranks of its own host. They wait
// for the report of these ranks, because the rank that they miss may itself wait for another.
constexpr auto kLocalDelay = 500ms;
constexpr auto kGrace = 1000ms, kGraceOfOne = 300ms;

// Up to this many bytes, few messages are faster than few bytes.
constexpr size_t kSmallBytes = 64 << 10;
// A rank that is alone on its host sends parts of these sizes, so that sums overlap with messages,
// and the memory for arriving data is bounded. First for all others together, then for a single
// other one.
constexpr int64_t kRoundBytes = 4 << 20, kExchangeBytes = 1 << 20;

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

/// The part of an all-to-all between the ranks `members` of this host.
void all_to_all_here(ShmTransport& local, const std::vector<int>& members, const Segments& to,
                     const Segments& from) {
  std::vector<at::Tensor> parts;
  Counts send, receive;
  for (const int peer : members) {
    parts.push_back(from[peer]);
    send.push_back(from.counts[peer]);
    receive.push_back(to.counts[peer]);
  }
  const auto arrived =
      at::empty({std::accumulate(receive.begin(), receive.end(), int64_t{0})}, to.flat.options());
  local.all_to_all(arrived, at::cat(parts), receive, send);
  const Segments received(arrived, receive, 1);
  for (size_t i = 0; i < members.size(); ++i) to[members[i]].copy_(received[static_cast<int>(i)]);
}

/// Where every host has one rank: the root sends each other rank a segment, and these ranks
/// exchange their segments.
void broadcast_in_segments(Messenger& messenger, int rank, const Segments& segments, int root) {
  for (int peer = 0; peer < segments.size(); ++peer)
    if (rank == root && peer != root) messenger.send(segments[peer], peer);
  if (rank != root) messenger.receive(segments[rank], root);
  messenger.finish();
  messenger.begin("broadcast");
  for (int peer = 0; peer < segments.size(); ++peer) {
    if (peer == rank) continue;
    if (rank != root) messenger.receive(segments[peer], peer);
    if (peer != root) messenger.send(segments[rank], peer);
  }
  messenger.finish();
}

class MessageTransport : public Transport {
 public:
  /// `local`: null if every host has one rank.
  MessageTransport(const World& world, HostMap map, std::unique_ptr<ShmTransport> local,
                   std::unique_ptr<Mailbox> mailbox)
      : map_(std::move(map)),
        tree_(world.wire == WireFormat::float32 ? HostSumTree(map_) : HostSumTree::by_host(map_)),
        format_(world.wire),
        rank_(world.rank),
        size_(world.size),
        host_(map_.host_of(rank_)),
        local_(std::move(local)),
        messenger_(world, std::move(mailbox), local_ ? kGrace : kGraceOfOne),
        leaders_(local_.get(), messenger_, map_, rank_) {}

  const char* name() const override { return messenger_.name(); }
  Sent sent() const override { return messenger_.sent(); }
  void set_timeout(std::chrono::milliseconds timeout) override {
    messenger_.set_timeout(timeout);
    if (local_) local_->set_timeout(timeout + kLocalDelay);
  }
  void set_stopped_timeout(std::chrono::milliseconds timeout) override {
    if (!local_) return messenger_.set_silence(timeout);
    local_->set_stopped_timeout(timeout);
    messenger_.set_silence(timeout, [this] { local_->abort(); });
  }
  void set_feedback(WireFeedback* feedback) override {
    feedback_ = feedback;
    if (feedback) feedback->begin();
  }
  void abort() noexcept override {
    messenger_.abort();
    if (local_) local_->abort();
  }

  std::vector<OpHeader> exchange(const OpHeader& mine) override {
    std::vector<OpHeader> headers(size_);
    run(describe(mine), [&] {
      const auto here = local_ ? local_->exchange(mine) : std::vector<OpHeader>{mine};
      constexpr auto bytes = static_cast<int64_t>(sizeof(OpHeader));
      const auto table = at::empty({size_ * bytes}, at::TensorOptions().dtype(at::kByte));
      int64_t before = 0;
      for (int host = 0; host < host_; ++host) before += bytes * map_.members(host).size();
      std::memcpy(data_of(table) + before, here.data(), here.size() * bytes);
      leaders_.gather_table(table, Counts(size_, bytes));
      const auto* from = reinterpret_cast<const OpHeader*>(data_of(table));
      for (int host = 0; host < map_.hosts(); ++host)
        for (const int rank : map_.members(host)) headers[rank] = *from++;
    });
    return headers;
  }

  void all_reduce(at::Tensor flat, double scale) override {
    const bool exact = format_ == WireFormat::float32;
    if (exact && ExchangeSums::fits(map_, tree_, flat.scalar_type()))
      return exchange_sums(flat, scale);
    if (exact && flat.nbytes() * (local_ ? size_ : 1) <= kSmallBytes)
      return all_reduce_small(flat, scale);
    const auto counts = even_counts(flat.numel(), size_);
    const auto encoding = encoding_of(flat);
    sum_to_owners(Op::all_reduce, flat, counts, {scale}, encoding);
    distribute(Op::all_gather, flat, counts, encoding);
  }

  void reduce(at::Tensor flat, int root) override {
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    sum_to_owners(Op::reduce, flat, counts, {}, {});
  }

  void broadcast(at::Tensor flat, int root) override {
    if (!local_ && size_ > 2 && flat.nbytes() > kSmallBytes) {
      messenger_.begin("broadcast");
      const Segments segments(flat, even_counts(flat.numel(), size_), 1);
      return broadcast_in_segments(messenger_, rank_, segments, root);
    }
    Counts counts(size_, 0);
    counts[root] = flat.numel();
    distribute(Op::broadcast, flat, counts, {});
  }

  void all_gather(at::Tensor flat, const Counts& counts) override {
    distribute(Op::all_gather, flat, counts, encoding_of(flat));
  }

  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    sum_to_owners(Op::reduce_scatter, flat, counts, target, encoding_of(flat));
  }

  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    run("all_to_all", [&] {
      const Segments from(input, send_counts, 1), to(output, recv_counts, 1);
      for (int peer = 0; peer < size_; ++peer)
        if (map_.host_of(peer) != host_) messenger_.receive(to[peer], peer);
      for (int peer = 0; peer < size_; ++peer)
        if (map_.host_of(peer) != host_) messenger_.send(from[peer], peer);
      if (local_) all_to_all_here(*local_, map_.members(host_), to, from);
      else to[rank_].copy_(from[rank_]);
      messenger_.finish();
    });
  }

  at::Tensor allocate(int64_t numel, at::TensorOptions options, bool common) override {
    if (!local_) return {};
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
      leaders_.gather(failed, Counts(size_, 1));
      const auto first = failed.nonzero();
      if (problem.empty() && first.numel() > 0)
        problem = fmt::format("ProcessGroup.allocate: rank {} of {}: the host of rank {} failed",
                              rank_, size_, first[0].item<int64_t>());
    });
    if (!problem.empty()) throw UsageError(problem);
    return result;
  }

  at::Tensor peer_view(const at::Tensor& allocated, int peer) const override {
    if (!local_ || map_.host_of(peer) != host_) return {};
    return local_->peer_view(allocated, map_.local_rank(peer));
  }

 private:
  /// Runs one collective. A failure on this host becomes a failure of the group, and ends this
  /// rank's part in both levels.
  template <class Body>
  void run(const std::string& operation, const Body& body) {
    messenger_.begin(operation);
    if (!local_) return body();
    try {
      body();
    } catch (...) {
      give_up(operation);
    }
  }

  /// For a handler of the exception that has ended a collective.
  [[noreturn]] void give_up(const std::string& operation) {
    try {
      try {
        throw;
      } catch (const BrokenWorldError& error) {
        if (messenger_.has_failed()) throw;
        if (messenger_.has_lost()) messenger_.fail({}, error.what());
        std::vector<int> suspects;
        for (const int local : error.ranks()) suspects.push_back(map_.members(host_)[local]);
        if (suspects.empty() || suspects == std::vector<int>{rank_}) {
          throw BrokenWorldError(fmt::format("ProcessGroup ({}): rank {} of {} gave up in {}: {}",
                                             name(), rank_, size_, operation, error.what()),
                                 suspects);
        }
        messenger_.fail(suspects, error.what(), true);
      }
    } catch (...) {
      abort();
      throw;
    }
  }

  /// For one collective of `flat`.
  Encoding encoding_of(const at::Tensor& flat) {
    auto* const feedback = std::exchange(feedback_, nullptr);
    if (!flat.is_floating_point()) return {};
    return {format_, feedback};
  }

  /// With the number of elements that a rank uses at a time.
  Segments segments_of(const at::Tensor& flat, const Counts& counts) const {
    const auto width = static_cast<int64_t>(flat.element_size());
    const auto others = static_cast<int64_t>(counts.size()) - 1;
    const int64_t alone = others == 0 ? kExchangeBytes : kRoundBytes / others;
    return {flat, counts,
            local_ ? ShmTransport::window_step(counts.size(), width)
                   : std::max<int64_t>(1, alone / width)};
  }

  /// ShmTransport::share_windows(), also where this rank is alone on its host.
  void share_windows(Op op, const Segments& segments, ShmTransport::WindowUse& use) {
    if (local_) return local_->share_windows(op, segments, use);
    for (int64_t round = 0; round < segments.windows; ++round)
      use.visit(round, {segments, round, 0, true, {data_of(segments.flat)}});
    use.finish();
  }

  void all_reduce_small(const at::Tensor& flat, double scale) {
    run("all_reduce", [&] {
      auto parts = at::empty({size_, flat.numel()}, flat.options());
      parts[rank_].copy_(flat);
      leaders_.gather(parts.view({-1}), Counts(size_, flat.numel()));
      flat.copy_(sum_rows(parts, scale));
    });
  }

  void sum_to_owners(Op op, const at::Tensor& flat, const Counts& counts, const Target& target,
                     const Encoding& encoding) {
    run(op_name(op), [&] {
      const auto segments = segments_of(flat, counts);
      SumToOwners sum(messenger_, map_, tree_, rank_, segments, target, encoding);
      share_windows(op, segments, sum);
      sum.complete();
    });
  }

  /// The all-reduce of two hosts.
  void exchange_sums(const at::Tensor& flat, double scale) {
    run("all_reduce", [&] {
      const auto counts = even_counts(flat.numel(), static_cast<int>(map_.members(host_).size()));
      const auto parts = segments_of(flat, counts);
      ExchangeSums sum(messenger_, map_, rank_, parts, scale);
      share_windows(Op::all_reduce, parts, sum);
      if (!sum.reached_all()) local_->all_gather(flat, counts);
    });
  }

  /// Brings each rank's segment of `flat` to all ranks.
  void distribute(Op op, const at::Tensor& flat, const Counts& counts, const Encoding& encoding) {
    run(op_name(op), [&] {
      if (!encoding && flat.nbytes() <= kSmallBytes) return leaders_.gather(flat, counts);
      // A rank that is alone copies nothing, so a segment is one message.
      const auto segments =
          local_ ? segments_of(flat, counts) : Segments(flat, counts, flat.numel());
      Distribution distribution(messenger_, map_, rank_, segments, encoding);
      if (local_) local_->share_windows(op, segments, distribution);
      messenger_.finish();
    });
  }

  HostMap map_;
  HostSumTree tree_;
  WireFormat format_;
  WireFeedback* feedback_ = nullptr;
  int rank_, size_, host_;
  std::unique_ptr<ShmTransport> local_;
  Messenger messenger_;
  GatherOverLeaders leaders_;
};

}  // namespace

std::unique_ptr<Transport> make_message_transport(const World& world,
                                                  std::unique_ptr<Mailbox> mailbox) {
  std::vector<int> hosts(world.size);
  std::iota(hosts.begin(), hosts.end(), 0);
  return std::make_unique<MessageTransport>(world, HostMap(hosts), nullptr, std::move(mailbox));
}

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
  return std::make_unique<MessageTransport>(world, std::move(map), std::move(local),
                                            make_default_mailbox(world));
}

}  // namespace tessera::comm
