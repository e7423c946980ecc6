#include "comm/exact_fit.h"
#include "comm/memory.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <set>

namespace {

using namespace tessera;

TEST(ExactFit, WhatWasFreedFitsAgain) {
  auto* const before = c10::GetAllocator(at::kCPU);
  void* const libtorchs = before->raw_allocate(100000);
  if (!comm::fit_exactly()) GTEST_SKIP() << "malloc is not glibc's (a sanitizer's)";
  comm::retain_freed_memory();

  // Between blocks of several sizes, what keeps them apart when they are freed.
  const auto fill = [](std::vector<at::Tensor>& tensors, std::vector<void*>* apart) {
    for (int i = 0; i < 200; ++i) {
      tensors.push_back(at::empty({30000 + 1000 * (i % 5)}));
      if (apart) apart->push_back(std::malloc(4000));
    }
  };
  std::vector<at::Tensor> tensors;
  std::vector<void*> apart;
  fill(tensors, &apart);
  std::set<const void*> places;
  for (const auto& tensor : tensors) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 64, 0u);
    places.insert(tensor.data_ptr());
  }
  tensors.clear();
  fill(tensors, nullptr);
  int found = 0;
  for (const auto& tensor : tensors) found += places.contains(tensor.data_ptr());
  EXPECT_GE(found, 180);
  for (void* block : apart) std::free(block);

  // Freed by address, whoever allocated it.
  auto* const now = c10::GetAllocator(at::kCPU);
  void* const own = now->raw_allocate(100000);
  std::memset(own, 1, 100000);
  now->raw_deallocate(own);
  now->raw_deallocate(libtorchs);
  EXPECT_EQ(at::empty({0}).numel(), 0);
  EXPECT_ANY_THROW(at::empty({int64_t{1} << 60}));
}

}  // namespace
