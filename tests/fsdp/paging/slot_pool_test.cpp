#include "fsdp/paging/slot_pool.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "harness/ranks.h"
#include "memory/placement_allocator.h"

namespace {

using namespace tessera;
using namespace tessera::testing;

/// Number of whole pages of `tensor` that are in memory.
int64_t resident_pages(const at::Tensor& tensor) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + page - 1) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(tensor.data_ptr()) + tensor.nbytes()) / page * page;
  std::vector<unsigned char> flags((end - begin) / page);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(begin), end - begin, flags.data()), 0);
  return std::count_if(flags.begin(), flags.end(), [](unsigned char flag) { return flag & 1; });
}

TEST(SlotPool, ReturnsThePagesOfASlotOnRequest) {
  constexpr int64_t kNumel = 1 << 18;
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      fsdp::SlotPool pool(group, kNumel, at::kFloat);
      auto slot = pool.take(kNumel);
      slot.fill_(1);
      const auto* place = slot.data_ptr();
      const auto pages = resident_pages(slot);
      EXPECT_GT(pages, 10);  // 15 of 64 KiB, 255 of 4 KiB
      pool.give(slot);
      slot = pool.take(kNumel);
      EXPECT_EQ(resident_pages(slot), pages);
      group.barrier();
      pool.give(slot, false);
      EXPECT_EQ(resident_pages(slot), 0) << "world " << world;
      slot = pool.take(kNumel / 2);
      EXPECT_EQ(slot.data_ptr(), place);
      slot.fill_(2);
      EXPECT_EQ(slot.sum().item<double>(), kNumel);
      group.barrier();
    });
  }
}

TEST(SlotPool, ADisplacedSlotIsPrivateUntilItsMemoryIsFree) {
  for (int world = 1; world <= 3; ++world) {
    run_ranks(world, [&](ProcessGroup group, int rank) {
      fsdp::SlotPool pool(group, 100, at::kFloat);
      auto slot = pool.take(100);
      const auto* home = slot.data_ptr();
      const auto window = slot.narrow(0, 32, 16);
      auto other = memory::place_in(window);
      auto substitute = pool.displace(slot, {window});
      EXPECT_EQ(substitute.numel(), 100);
      EXPECT_NE(substitute.data_ptr(), home);
      const auto* moved = substitute.data_ptr();
      pool.give(substitute);
      slot = pool.take(50);
      EXPECT_EQ(slot.data_ptr(), moved) << "the other tensor still uses the slot";
      EXPECT_NE(pool.take(50).data_ptr(), home);
      // The substitute is used by another tensor in turn.
      const auto second = slot.narrow(0, 0, 16);
      auto another = memory::place_in(second);
      substitute = pool.displace(slot, {second});
      EXPECT_NE(substitute.data_ptr(), moved);
      other.clear();
      pool.give(substitute);
      EXPECT_EQ(pool.take(100).data_ptr(), home) << "rank " << rank;
      group.barrier();
    });
  }
}

}  // namespace
