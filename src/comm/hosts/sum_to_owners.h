#pragma once

#include <exception>
#include <vector>

#include "comm/hosts/encoding.h"
#include "comm/hosts/host_map.h"
#include "comm/p2p/messenger.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {

/// One reduce-scatter. In round i the ranks of a host add up windows i of all segments. They send
/// the sums for ranks of other hosts, and keep their own until the other hosts' sums arrive some
/// rounds later.
class SumToOwners : public ShmTransport::WindowUse {
 public:
  /// The arguments must outlive this object. With encoding `tree` is HostSumTree::by_host().
  SumToOwners(Messenger& messenger, const HostMap& map, const HostSumTree& tree, int rank,
              const Segments& segments, const Transport::Target& target, Encoding encoding);

  bool is_read(int segment, int64_t round) const override;
  void visit(int64_t round, const ShmTransport::Window& window) override;
  /// After all rounds. Rethrows what `consume` has thrown.
  void complete();

 private:
  static constexpr int64_t kAhead = 4;  // rounds in which a rank has messages in flight
  static constexpr int64_t kLag = 2;    // rounds between sending sums and using those of others

  struct Arriving {
    Messenger::Ticket ticket;
    int leaf;
    at::Tensor sum;
  };

  at::ScalarType dtype_of(int leaf) const;
  void post_receives(int64_t round);
  /// Of window `window.round`.
  at::Tensor sum_of(int leaf, int segment, const ShmTransport::Window& window) const;
  void combine(int64_t round);
  at::Tensor add_up(std::vector<at::Tensor> values, int64_t n) const;
  void deliver(int64_t offset, const at::Tensor& sum);

  Messenger& messenger_;
  const HostMap& map_;
  const HostSumTree& tree_;
  int rank_, host_;
  const Segments& segments_;
  const Transport::Target& target_;
  Encoding encoding_;
  at::ScalarType dtype_, wide_;
  std::vector<Messenger::Ticket> sent_[kAhead];
  std::vector<Arriving> arriving_[kAhead];
  std::vector<at::Tensor> own_[kAhead];  // by node
  std::exception_ptr consumer_failed_;
};

}  // namespace tessera::comm
