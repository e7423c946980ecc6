#include "memory/malloc_allocator.h"

#include <cstring>
#include <map>
#include <vector>

#include <gtest/gtest.h>
#include <torch/types.h>

#include "memory/heap.h"

namespace {

using namespace tessera;

TEST(MallocAllocator, AFreedBlockFitsTheNextTensorOfItsSize) {
  auto* const before = c10::GetAllocator(at::kCPU);
  void* const libtorchs = before->raw_allocate(100000);
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  ASSERT_FALSE(memory::use_malloc_for_tensors());
  GTEST_SKIP() << "malloc is the sanitizer's";
#endif
  ASSERT_TRUE(memory::use_malloc_for_tensors());
  memory::retain_freed_memory();

  std::vector<at::Tensor> tensors;
  std::map<const void*, size_t> by_address;
  for (size_t i = 0; i < 50; ++i) {
    tensors.push_back(at::empty({123457}));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensors[i].data_ptr()) % 64, 0u);
    by_address[tensors[i].data_ptr()] = i;
  }
  // The block lies between two others, so that it cannot merge with free memory when it is freed.
  int tried = 0, found = 0;
  for (auto left = by_address.begin(), at = std::next(left), right = std::next(at);
       right != by_address.end(); ++left, ++at, ++right) {
    const auto* const place = static_cast<const char*>(at->first);
    constexpr int64_t distance = 4 * 123457 + 2000;
    if (place - static_cast<const char*>(left->first) > distance ||
        static_cast<const char*>(right->first) - place > distance)
      continue;
    auto& tensor = tensors[at->second];
    tensor = at::Tensor();
    tensor = at::empty({123457});
    ++tried;
    found += tensor.data_ptr() == place;
  }
  EXPECT_GE(tried, 10);
  EXPECT_GE(found, tried * 3 / 4);  // a small block may be taken from a freed one

  // Frees by address memory of either allocator.
  auto* const now = c10::GetAllocator(at::kCPU);
  void* const own = now->raw_allocate(100000);
  std::memset(own, 1, 100000);
  now->raw_deallocate(own);
  now->raw_deallocate(libtorchs);
  EXPECT_EQ(at::empty({0}).numel(), 0);
  EXPECT_ANY_THROW(at::empty({int64_t{1} << 60}));
}

}  // namespace
