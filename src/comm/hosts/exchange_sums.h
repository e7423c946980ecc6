#pragma once

#include <cstdint>
#include <vector>

#include "comm/hosts/host_map.h"
#include "comm/p2p/messenger.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {

/// The sums of an all-reduce between two hosts of L ranks each. Rank l of a host adds up part l of
/// the host's tensors, window by window, sends the sum to rank l of the other host, and adds what
/// arrives from there. These are the bytes of a reduce-scatter and an all-gather, but no message
/// waits for the arrival of another one.
class ExchangeSums {
 public:
  /// Whether the hosts of `map` can do it: their sums must be the two halves of the sum over all
  /// ranks, and 16-bit floats would travel as float.
  static bool fits(const HostMap& map, const HostSumTree& tree, at::ScalarType dtype);

  /// The arguments outlive this object. `counts`: the elements of the L parts of `flat`.
  ExchangeSums(Messenger& messenger, const HostMap& map, int rank, const at::Tensor& flat,
               const std::vector<int64_t>& counts, double scale);

  /// Round `round`, with the windows of this host's ranks.
  void visit(int64_t round, const ShmTransport::Window& window);
  /// After the last round. This rank's part of `flat` then holds the sum over all ranks.
  void finish();
  /// Whether finish() has written that part to the tensors of all ranks of this host: it does if
  /// their windows are direct.
  bool reached_all() const { return direct_; }

 private:
  static constexpr int64_t kAhead = 4;  // rounds in which a rank has messages in flight

  struct Flying {
    Messenger::Ticket leaving, arriving;
    at::Tensor ours, theirs;  // memory that later rounds, which are no longer, use again
    std::vector<std::byte*> outputs;
  };

  int64_t count(int64_t round) const;
  void post_receive(int64_t round);
  void combine(int64_t round);

  Messenger& messenger_;
  int host_, local_, peer_, ranks_;
  int64_t count_, step_;
  at::Tensor part_;  // this rank's part of `flat`
  double scale_;
  int64_t rounds_ = 0, combined_ = 0;
  bool direct_ = true;  // also without rounds, when there is nothing to write
  Flying flying_[kAhead];
};

}  // namespace tessera::comm
