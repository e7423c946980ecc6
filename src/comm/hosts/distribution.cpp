#include "comm/hosts/distribution.h"

#include <utility>

#include "comm/shm/shm_kernels.h"

namespace tessera::comm {

Distribution::Distribution(Messenger& messenger, const HostMap& map, int rank,
                           const Segments& segments, Encoding encoding)
    : messenger_(messenger),
      map_(map),
      rank_(rank),
      host_(map.host_of(rank)),
      segments_(segments),
      encoding_(encoding) {
  const Segments stripes(segments.flat, segments.counts, kStripe * segments.step);
  for (int s = 0; s < stripes.size(); ++s) {
    for (int64_t i = 0; map.host_of(s) != host_ && stripes.count(s, i) > 0; ++i) {
      if (map.handler(host_, s, i) != rank) continue;
      auto part = stripes.window(s, i);
      auto encoded = encoding ? encoding.message(part.numel()) : at::Tensor();
      const auto ticket = messenger.receive(encoding ? encoded : part, s, static_cast<int>(i));
      arriving_[i].push_back({ticket, std::move(part), std::move(encoded)});
    }
  }
  for (int64_t i = 0; stripes.count(rank, i) > 0; ++i) {
    const auto part = stripes.window(rank, i);
    const auto sent = encoding ? encoding.encode(part) : part;
    for (int step = 1; step < map.hosts(); ++step) {
      const int host = (host_ + step) % map.hosts();
      messenger.send(sent, map.handler(host, rank, i), static_cast<int>(i));
    }
    if (encoding) part.copy_(encoding.decode(sent, part.numel()));
  }
}

int Distribution::source(int segment, int64_t round) const {
  return map_.host_of(segment) == host_ ? segment : map_.handler(host_, segment, round / kStripe);
}

bool Distribution::is_read(int segment, int64_t round) const {
  return source(segment, round) == rank_;
}

void Distribution::make_ready(int64_t round) {
  for (const auto& [ticket, part, encoded] : arriving_[round / kStripe]) {
    messenger_.wait(ticket);
    if (encoding_) part.copy_(encoding_.decode(encoded, part.numel()));
  }
}

void Distribution::visit(int64_t round, const ShmTransport::Window& window) {
  for (int segment = 0; segment < segments_.size(); ++segment) {
    const int64_t n = segments_.count(segment, round);
    const int from = source(segment, round);
    if (n == 0 || from == rank_) continue;
    const auto* const theirs = window(segment, map_.local_rank(from));
    auto* const here = data_of(segments_.flat) + segments_.offset(segment, round);
    if (theirs != here) copy_bytes(here, theirs, n * segments_.width);  // equal in common memory
  }
}

}  // namespace tessera::comm
