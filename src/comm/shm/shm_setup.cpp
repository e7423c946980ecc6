#include "comm/shm/shm_setup.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

#include <fmt/format.h>

#include "comm/shm/shm_transport.h"
#include "tessera/error.h"

namespace tessera::comm {
namespace {

/// The record that a rank publishes in the store. Trivially copyable.
struct Card {
  char layout[16] = "tessera shm 1";
  char host[112] = {};
  SegmentCard segment;
  char problem[384] = {};  ///< The reason why this rank has no segment; empty if it has one.
};

template <size_t n>
void put(char (&to)[n], const std::string& text) {
  std::snprintf(to, n, "%s", text.c_str());
}

std::string key_of(int rank) { return "shm/" + std::to_string(rank); }

bool switched_off() {
  const char* value = std::getenv("TESSERA_SHM");
  return value != nullptr && std::string(value) == "0";
}

std::shared_ptr<ShmSegment> make_own(const World& world, Card& card) {
  put(card.host, host_identity());
  try {
    if (switched_off()) throw std::runtime_error("TESSERA_SHM is 0 there");
    auto segment = ShmSegment::create(ShmTransport::segment_bytes, world.size);
    new (segment->data()) ControlBlock;
    card.segment = segment->card();
    return segment;
  } catch (const std::exception& error) {
    put(card.problem, error.what());
    return nullptr;
  }
}

std::vector<Card> exchange_cards(const World& world, const Card& mine) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&mine);
  world.store->set(key_of(world.rank), std::vector<uint8_t>(bytes, bytes + sizeof mine));
  std::vector<std::string> keys;
  for (int r = 0; r < world.size; ++r) keys.push_back(key_of(r));
  try {
    world.store->wait(keys, world.options.timeout);
  } catch (const std::exception& error) {
    std::vector<int> missing;
    for (int r = 0; r < world.size; ++r)
      if (!world.store->check({keys[r]})) missing.push_back(r);
    throw BrokenWorldError(
        fmt::format("ProcessGroup (shm): rank {} of {} waited {} ms at start-up: {} did not arrive",
                    world.rank, world.size, world.options.timeout.count(), rank_list(missing)),
        missing);
  }
  std::vector<Card> cards(world.size);
  for (int r = 0; r < world.size; ++r) {
    const auto value = world.store->get(keys[r]);
    if (value.size() == sizeof(Card)) std::memcpy(&cards[r], value.data(), sizeof(Card));
    if (value.size() != sizeof(Card) || std::string(cards[r].layout) != mine.layout)
      put(cards[r].problem, "it runs another version of this library");
  }
  return cards;
}

// The reason against shared memory; empty if there is none. All ranks see the same cards and so
// return the same.
std::string refusal(const std::vector<Card>& cards) {
  for (size_t r = 0; r < cards.size(); ++r) {
    if (cards[r].problem[0] != 0)
      return fmt::format("rank {} has no shared memory: {}", r, cards[r].problem);
    if (std::string(cards[r].host) != cards[0].host)
      return fmt::format("rank {} is on another host or in another pid namespace than rank 0", r);
  }
  return "";
}

/// The segments of all ranks, null where this rank could not map one, and the first reason for
/// that.
struct Mapped {
  std::vector<std::shared_ptr<ShmSegment>> segments;
  std::string problem;
};

Mapped map_peers(int rank, const std::vector<Card>& cards, const std::shared_ptr<ShmSegment>& own) {
  Mapped mapped;
  for (int r = 0; r < static_cast<int>(cards.size()); ++r) {
    mapped.segments.push_back(r == rank ? own : nullptr);
    if (r == rank) continue;
    try {
      mapped.segments[r] = ShmSegment::open(cards[r].segment);
    } catch (const std::exception& error) {
      if (mapped.problem.empty())
        mapped.problem =
            fmt::format("rank {} cannot map the memory of rank {}: {}", rank, r, error.what());
    }
  }
  return mapped;
}

ControlBlock& block_of(const ShmSegment& segment) {
  return *std::launder(reinterpret_cast<ControlBlock*>(segment.data()));
}

// A barrier with the ranks whose memory could be mapped. Returns the first reason why a rank could
// not map a peer; empty if there is none. A rank that could not map all of its peers has a reason
// of its own, so either every rank returns a reason or none does.
std::string wait_for_all(int rank, const Mapped& mapped, std::chrono::milliseconds timeout) {
  std::vector<ShmControl::Member> members;
  int my_place = 0;
  std::snprintf(block_of(*mapped.segments[rank]).problem, sizeof(ControlBlock::problem), "%s",
                mapped.problem.c_str());
  for (int r = 0; r < static_cast<int>(mapped.segments.size()); ++r) {
    if (!mapped.segments[r]) continue;
    if (r == rank) my_place = static_cast<int>(members.size());
    const auto& card = mapped.segments[r]->card();
    members.push_back({&block_of(*mapped.segments[r]), {card.pid, card.start_time}});
  }
  ShmControl control(my_place, members, timeout);
  control.begin("start-up");
  control.barrier();
  for (const auto& member : members)
    if (member.block->problem[0] != 0) return member.block->problem;
  return "";
}

}  // namespace

std::unique_ptr<ShmTransport> make_shm_transport(const World& world, std::string& reason) {
  Card mine;
  const auto own = make_own(world, mine);
  const auto cards = exchange_cards(world, mine);
  reason = refusal(cards);
  if (!reason.empty()) return nullptr;
  auto mapped = map_peers(world.rank, cards, own);
  reason = wait_for_all(world.rank, mapped, world.options.timeout);
  if (!reason.empty()) return nullptr;
  own->close_file();
  return std::make_unique<ShmTransport>(world.rank, std::move(mapped.segments),
                                        world.arena ? world.arena : std::make_shared<ShmArena>(),
                                        world.options.timeout);
}

}  // namespace tessera::comm
