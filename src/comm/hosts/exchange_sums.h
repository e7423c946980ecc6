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
/// waits for another one.
class ExchangeSums : public ShmTransport::WindowUse {
 public:
  /// True if the hosts of `map` can do this: their sums must be the two halves of the sum over all
  /// ranks, and sums of 16-bit floats would travel as float.
  static bool fits(const HostMap& map, const HostSumTree& tree, at::ScalarType dtype);

  /// The arguments must outlive this object. `parts`: the L parts of the tensor.
  ExchangeSums(Messenger& messenger, const HostMap& map, int rank, const Segments& parts,
               double scale);

  bool is_read(int segment, int64_t) const override { return segment != local_; }
  void visit(int64_t round, const ShmTransport::Window& window) override;
  /// This rank's part of the tensor then holds the sum over all ranks.
  void finish() override;
  /// True if finish() has written that part to the tensors of all ranks of this host, as it does if
  /// their windows are direct.
  bool reached_all() const { return direct_; }

 private:
  static constexpr int64_t kAhead = 4;  // rounds in which a rank has messages in flight

  struct Flying {
    Messenger::Ticket leaving, arriving;
    at::Tensor ours, theirs;  // memory that later rounds, which are no longer, use again
    std::vector<std::byte*> outputs;
  };

  void post_receive(int64_t round);
  void combine(int64_t round);

  Messenger& messenger_;
  int host_, local_, peer_;
  const Segments& parts_;
  double scale_;
  int64_t combined_ = 0;
  bool direct_ = true;  // also without rounds, when there is nothing to write
  Flying flying_[kAhead];
};

}  // namespace tessera::comm
