#include "comm/shm/shm_transport.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera::comm {
namespace {

static_assert(sizeof(ControlBlock) <= ShmTransport::control_bytes);

std::vector<ShmControl::Member> members_of(
    const std::vector<std::shared_ptr<ShmSegment>>& segments) {
  std::vector<ShmControl::Member> members;
  for (const auto& segment : segments) {
    const auto& card = segment->card();
    members.push_back({std::launder(reinterpret_cast<ControlBlock*>(segment->data())),
                       {card.pid, card.start_time}});
  }
  return members;
}

/// The record that a rank sends about its tensor before a collective.
struct Descriptor {
  int64_t allocation = -1;
  int64_t offset = 0;
  int64_t amount = 0;
};

}  // namespace

ShmTransport::ShmTransport(int rank, std::vector<std::shared_ptr<ShmSegment>> segments,
                           std::shared_ptr<ShmArena> arena, std::chrono::milliseconds timeout)
    : rank_(rank),
      size_(static_cast<int>(segments.size())),
      segments_(std::move(segments)),
      control_(rank, members_of(segments_), timeout),
      arena_(std::move(arena)),
      next_allocation_(arena_->begin_numbers()) {
  for (const auto& segment : segments_) staging_.push_back(segment->data() + control_bytes);
}

ShmTransport::~ShmTransport() { control_.leave(); }

std::vector<OpHeader> ShmTransport::exchange(const OpHeader& mine) {
  control_.begin(describe(mine));
  announced_ = true;
  return control_.share(mine);
}

void ShmTransport::run(Op op, const at::Tensor& tensor, const std::function<void()>& body) {
  if (!std::exchange(announced_, false)) {
    control_.begin(fmt::format("{} of {} {}", op_name(op), tensor.numel(),
                               c10::toString(tensor.scalar_type())));
  }
  try {
    op_ = op;
    body();
  } catch (...) {
    control_.give_up();
    throw;
  }
}

ShmTransport::ExchangedLayout ShmTransport::exchange_layout(const at::Tensor& tensor,
                                                            const std::function<void()>& fill,
                                                            int64_t amount) {
  const auto place = arena_->find(tensor);
  Descriptor mine;
  mine.amount = amount;
  if (place) {
    mine.allocation = place->allocation->id;
    mine.offset = place->offset;
  } else if (fill) {
    fill();
  }
  const auto all = control_.share(mine);
  ExchangedLayout exchanged;
  exchanged.filled = true;
  bool direct = true;
  for (const auto& theirs : all) {
    direct = direct && theirs.allocation >= 0 && theirs.allocation == all[0].allocation;
    exchanged.filled = exchanged.filled && theirs.allocation < 0;
    exchanged.largest = std::max(exchanged.largest, theirs.amount);
  }
  if (direct && place->allocation->common() && op_ != Op::all_gather) {
    for (int b = 1; b < size_; ++b) {
      for (int a = 0; a < b; ++a) {
        if (std::abs(all[b].offset - all[a].offset) >= static_cast<int64_t>(tensor.nbytes()))
          continue;
        throw UsageError(fmt::format(
            "ProcessGroup.{}: ranks {} and {} passed overlapping parts of "
            "allocate_common() memory; expected all_gather, or parts that do not overlap",
            op_name(op_), a, b));
      }
    }
  }
  for (int r = 0; direct && r < size_; ++r)
    exchanged.direct.push_back(place->allocation->data(r) + all[r].offset);
  const auto forgets = [](const auto& segment) { return segment->forgets(); };
  if (direct && !place->allocation->common() &&
      std::any_of(place->allocation->segments.begin(), place->allocation->segments.end(), forgets))
    exchanged.allocation = place->allocation;
  return exchanged;
}

void ShmTransport::forget_peers(const ExchangedLayout& exchanged, int64_t begin,
                                int64_t bytes) const {
  for (int r = 0; r < size_; ++r)
    exchanged.allocation->segments[r]->forget(exchanged.direct[r] + begin, bytes);
}

void ShmTransport::rounds(int64_t count, const ExchangedLayout& exchanged, const Step& fill,
                          const Step& drain) {
  for (int64_t round = 0; round < count; ++round) {
    if (round > 0 || !exchanged.filled) {
      fill(round);
      control_.barrier();
    }
    drain(round);
    ++turn_;
  }
}

std::vector<std::shared_ptr<ShmSegment>> ShmTransport::open_all(
    const std::shared_ptr<ShmSegment>& own, int makers, const std::string& problem) {
  const auto cards = control_.share(own ? own->card() : SegmentCard{});
  // Written after the exchange, because only then have all ranks read the previous text.
  auto& block = control_.block(rank_);
  std::snprintf(block.problem, sizeof block.problem, "%s", problem.c_str());
  std::vector<std::shared_ptr<ShmSegment>> opened;
  const bool all_made = std::all_of(cards.begin(), cards.begin() + makers,
                                    [](const SegmentCard& card) { return card.fd >= 0; });
  try {
    for (int r = 0; all_made && r < makers; ++r)
      opened.push_back(r == rank_ ? own : ShmSegment::open(cards[r]));
  } catch (const std::exception& error) {
    std::snprintf(block.problem, sizeof block.problem, "%s", error.what());
  }
  control_.barrier();
  for (int r = 0; r < size_; ++r) {
    const std::string theirs = control_.block(r).problem;
    if (!theirs.empty())
      throw UsageError(fmt::format("ProcessGroup.allocate: rank {} of {}: rank {} failed: {}",
                                   rank_, size_, r, theirs));
  }
  return opened;
}

at::Tensor ShmTransport::allocate(int64_t numel, at::TensorOptions options, bool common) {
  if (!std::exchange(announced_, false))
    control_.begin(fmt::format("allocate of {} elements", numel));
  const int64_t id = next_allocation_++;
  std::string problem;
  std::shared_ptr<ShmSegment> own;
  try {
    const auto width = static_cast<int64_t>(options.dtype().itemsize());
    if (numel > INT64_MAX / width)
      throw std::runtime_error(
          fmt::format("{} elements of {} bytes are more than any machine has", numel, width));
    if (!common) own = ShmSegment::create(numel * width, size_);
    else if (rank_ == 0) own = ShmSegment::create(numel * width, 1);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  auto allocation = std::make_shared<ShmAllocation>();
  allocation->id = id;
  allocation->rank = rank_;
  allocation->segments = open_all(own, common ? 1 : size_, problem);
  allocation->segments.resize(size_, allocation->segments[0]);
  if (own) own->close_file();
  return arena_->adopt(std::move(allocation), numel, options);
}

at::Tensor ShmTransport::peer_view(const at::Tensor& allocated, int peer) const {
  if (!allocated.defined() || !allocated.is_contiguous()) return {};
  const auto place = arena_->find(allocated);
  if (!place) return {};
  return tensor_at(place->allocation, peer, place->offset, allocated.sizes(), allocated.options());
}

}  // namespace tessera::comm
