// Which part of its peers' memory a rank maps: see [Note: huge pages] in shm_segment.cpp.
#include <algorithm>
#include <fstream>
#include <numeric>

#include <gmock/gmock.h>
#include <sys/mman.h>

#include "child.h"
#include "comm/shm/shm_segment.h"
#include "comm/shm/shm_transport.h"
#include "shm_worlds.h"

namespace {

using namespace tessera::testing;
using tessera::comm::Op;
using tessera::comm::ShmSegment;
using tessera::comm::ShmTransport;
using tessera::comm::Transport;

constexpr int64_t kMiB = 1 << 20;

/// A field of /proc/self/smaps, in bytes, for the mapping that contains `address`.
int64_t mapped_around(const void* address, const std::string& field = "Rss:") {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream file("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2)
      inside = begin <= wanted && wanted < end;
    else if (inside && line.starts_with(field)) return std::stoll(line.substr(field.size())) * 1024;
  }
  return -1;
}

bool system_makes_huge_pages() {
  constexpr size_t huge = 2 << 20;
  const int fd = memfd_create("tessera-probe", MFD_CLOEXEC);
  auto* reserved =
      static_cast<char*>(mmap(nullptr, 2 * huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  auto* start = reserved + (-reinterpret_cast<uintptr_t>(reserved) & (huge - 1));
  bool made = false;
  if (ftruncate(fd, huge) == 0 && mmap(start, huge, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_FIXED | MAP_POPULATE, fd, 0) == start) {
    constexpr int collapse = 25;  // MADV_COLLAPSE
    made = sysconf(_SC_PAGESIZE) == 4096 && madvise(start, huge, collapse) == 0;
  }
  munmap(reserved, 2 * huge);
  close(fd);
  return made;
}

TEST(ShmWindows, ANewSegmentIsZeroAndPresent) {
  for (const int64_t bytes : {1 * kMiB, 4 * kMiB, 11 * kMiB + 5}) {
    for (int time = 0; time < 2; ++time) {  // the second one has pages of the first one
      const auto segment = ShmSegment::create(bytes, 1);
      EXPECT_GE(mapped_around(segment->data()), bytes);
      EXPECT_EQ(std::count(segment->data(), segment->data() + bytes, std::byte{0}), bytes);
      std::fill_n(segment->data(), bytes, std::byte{1});
    }
  }
}

TEST(ShmWindows, ForgottenPagesOfAPeerAreUnmappedAndMappedAgainOnAccess) {
  if (!system_makes_huge_pages())
    GTEST_SKIP() << "this system makes no huge pages of shared memory";
  constexpr int64_t bytes = 11 * kMiB;
  const auto segment = ShmSegment::create(bytes, 1);
  ASSERT_GT(segment->card().huge, 0u);
  for (int64_t i = 0; i < bytes; ++i) segment->data()[i] = static_cast<std::byte>(i + 1);
  EXPECT_FALSE(segment->forgets()) << "own memory stays";
  segment->forget(segment->data(), bytes);
  EXPECT_GE(mapped_around(segment->data()), bytes);
  Child peer([&] {
    const auto theirs = ShmSegment::open(segment->card());
    const auto sum = [&] {
      return std::accumulate(
          theirs->data(), theirs->data() + bytes, uint64_t{0},
          [](uint64_t a, std::byte b) { return a + std::to_integer<uint64_t>(b); });
    };
    const auto before = sum();
    const bool counted = mapped_around(theirs->data()) >= bytes;
    theirs->forget(theirs->data() + 5 * kMiB, 1);
    const bool one_page_less = mapped_around(theirs->data()) <= bytes - 1 * kMiB;
    theirs->forget(theirs->data(), bytes);
    const bool none =
        mapped_around(theirs->data()) <= static_cast<int64_t>(bytes + 4096 - theirs->card().huge);
    theirs->data()[7] = std::byte{99};
    if (!counted || !one_page_less || !none || sum() != before + 99 - 8) _exit(1);
  });
  EXPECT_EQ(peer.wait(), 0);
  EXPECT_EQ(segment->data()[7], std::byte{99});
}

/// Adds up the windows of one peer, and looks at how much of its memory is mapped meanwhile.
class ReadsPeer : public ShmTransport::WindowUse {
 public:
  ReadsPeer(int peer, std::function<int64_t()> mapped) : peer_(peer), mapped_(std::move(mapped)) {}
  bool is_read(int, int64_t) const override { return true; }
  void visit(int64_t round, const ShmTransport::Window& window) override {
    EXPECT_TRUE(window.direct);
    for (int segment = 0; segment < window.segments.size(); ++segment) {
      const auto values =
          at::from_blob(window(segment, peer_), {window.segments.count(segment, round)});
      total += values.sum(at::kDouble).item<double>();
    }
    most_mapped = std::max(most_mapped, mapped_());
  }

  double total = 0;
  int64_t most_mapped = 0;

 private:
  int peer_;
  std::function<int64_t()> mapped_;
};

class ShmWindowsOfWorld : public ::testing::TestWithParam<int> {};

/// Ranks are processes here, because ranks that are threads share one mapping and forget nothing.
TEST_P(ShmWindowsOfWorld, EveryCollectiveGivesTheSameResultAndLeavesNoPeerMemoryMapped) {
  const int size = GetParam();
  constexpr int64_t numel = 6'000'037;  // 23 MiB: several windows, the last one short
  Processes ranks(size, [&](Transport& transport, int rank) {
    auto flat = transport.allocate(numel, at::kFloat, false);
    const auto index = at::arange(numel).remainder(1021).to(at::kFloat);  // sums stay exact
    const auto fill = [&] { flat.copy_(index).add_(static_cast<double>(rank)); };
    const auto sum = index * size + static_cast<double>(size * (size - 1) / 2);
    std::vector<int64_t> counts(size, numel / size);
    counts.back() += numel - numel / size * size;
    const int64_t start = rank * (numel / size);
    const auto own = [&](const at::Tensor& t) { return t.narrow(0, start, counts[rank]); };
    auto in_huge_pages =
        at::full({1}, mapped_around(flat.data_ptr(), "ShmemPmdMapped:") >= 22 * kMiB ? 1.F : 0.F);
    transport.all_reduce(in_huge_pages, 1);
    const bool huge = in_huge_pages.item<float>() == static_cast<float>(size);  // on all ranks
    const auto expect_nothing_mapped = [&](const char* after) {
      for (int peer = 0; peer < size && huge; ++peer)
        if (peer != rank)
          EXPECT_LE(mapped_around(transport.peer_view(flat, peer).data_ptr()), 2 * kMiB) << after;
    };
    fill();
    transport.all_reduce(flat, 0.5);
    EXPECT_TRUE(at::equal(flat, sum * 0.5));
    expect_nothing_mapped("all_reduce");

    fill();
    transport.broadcast(flat, size - 1);
    EXPECT_TRUE(at::equal(flat, index + static_cast<double>(size - 1)));
    expect_nothing_mapped("broadcast");

    fill();
    transport.reduce(flat, 0);
    if (rank == 0) EXPECT_TRUE(at::equal(flat, sum));
    expect_nothing_mapped("reduce");

    fill();
    transport.reduce_scatter(flat, counts, {});
    EXPECT_TRUE(at::equal(own(flat), own(sum)));
    expect_nothing_mapped("reduce_scatter");

    fill();
    auto output = at::empty({counts[rank]});
    transport.reduce_scatter(flat, counts, {0.5, nullptr, output});
    EXPECT_TRUE(at::equal(output, own(sum) * 0.5));
    expect_nothing_mapped("reduce_scatter_into");

    fill();
    auto kept = at::zeros({counts[rank]});
    int64_t most = 0, next = 0;
    const Transport::ConsumeRun consume = [&](int64_t offset, const at::Tensor& run) {
      EXPECT_EQ(offset, next);
      next += run.numel();
      kept.narrow(0, offset, run.numel()).copy_(run);
      if (huge && offset % (1 << 18) == 0)
        most =
            std::max(most, mapped_around(transport.peer_view(flat, (rank + 1) % size).data_ptr()));
    };
    transport.reduce_scatter(flat, counts, {1, &consume});
    EXPECT_EQ(next, counts[rank]);
    EXPECT_TRUE(at::equal(kept, own(sum)));
    EXPECT_EQ(most > 0, huge) << "the part being read is mapped";
    EXPECT_LE(most, 8 * kMiB) << "a window, rounded to huge pages";
    expect_nothing_mapped("reduce_scatter with consume");

    flat.fill_(-1);
    own(flat).copy_(own(index));
    transport.all_gather(flat, counts);
    EXPECT_TRUE(at::equal(flat, index));
    expect_nothing_mapped("all_gather");

    // As between hosts: every rank reads a window of every segment in each round.
    fill();
    const int next_rank = (rank + 1) % size;
    const tessera::comm::Segments segments(
        flat, counts, ShmTransport::window_step(counts.size(), flat.element_size()));
    ReadsPeer reads(next_rank, [&]() -> int64_t {
      return huge ? mapped_around(transport.peer_view(flat, next_rank).data_ptr()) : 0;
    });
    dynamic_cast<ShmTransport&>(transport).share_windows(Op::reduce_scatter, segments, reads);
    const auto [total, seen] = std::pair(reads.total, reads.most_mapped);
    EXPECT_EQ(total,
              (index + static_cast<double>((rank + 1) % size)).sum(at::kDouble).item<double>());
    EXPECT_EQ(seen > 0, huge) << "the part being read is mapped";
    EXPECT_LE(seen, (size * 4 + 2) * kMiB) << "a page of each segment, rounded, and small pages";
    expect_nothing_mapped("share_windows");
  });
  ranks.expect_all_succeed();
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmWindowsOfWorld, ::testing::Values(2, 3, 4),
                         [](const auto& p) { return "World" + std::to_string(p.param); });

}  // namespace
