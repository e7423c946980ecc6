#pragma once

#include <map>
#include <vector>

#include "comm/hosts/encoding.h"
#include "comm/hosts/host_map.h"
#include "comm/p2p/messenger.h"
#include "comm/shm/shm_transport.h"

namespace tessera::comm {

/// One all-gather: brings each rank's segment to all ranks. Each other host receives it once, on
/// one of its ranks, and the others copy it from there. They copy one stripe while the next one
/// arrives. The messages are posted by the constructor.
class Distribution : public ShmTransport::WindowUse {
 public:
  /// The arguments must outlive this object.
  Distribution(Messenger& messenger, const HostMap& map, int rank, const Segments& segments,
               Encoding encoding);

  bool is_read(int segment, int64_t round) const override;
  void visit(int64_t round, const ShmTransport::Window& window) override;
  int64_t stripe() const override { return kStripe; }
  void make_ready(int64_t round) override;

 private:
  static constexpr int64_t kStripe = 4;  // rounds that are one message

  struct Arriving {
    Messenger::Ticket ticket;
    at::Tensor part, encoded;  // `encoded` is undefined if values travel exactly
  };

  /// The rank of this host that has a window.
  int source(int segment, int64_t round) const;

  Messenger& messenger_;
  const HostMap& map_;
  int rank_, host_;
  const Segments& segments_;
  Encoding encoding_;
  std::map<int64_t, std::vector<Arriving>> arriving_;  // by stripe
};

}  // namespace tessera::comm
