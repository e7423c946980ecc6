#include "tessera/memory/deferred_init.h"

#include <atomic>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include "deferred/bits.h"
#include "harness/memory.h"
#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"
#include "tessera/optim/optimizer_state_dict.h"
#include "tessera/safetensors.h"
#include "tessera/weights/torch_file.h"
#include "tessera/weights/weights.h"

namespace tessera::testing {
namespace {

struct LayersImpl : torch::nn::Module {
  explicit LayersImpl(int64_t layers, int64_t width = 1024) {
    for (int64_t i = 0; i < layers; ++i)
      register_module("l" + std::to_string(i), torch::nn::Linear(width, width));
  }
};
TORCH_MODULE(Layers);

// 64 layers of 4 MiB.
TEST(DeferredInit, AModelTakesNoMemoryUntilItIsMaterialised) {
  const auto before = resident_bytes();
  auto net = deferred_init([] { return Layers(64); });
  EXPECT_LT(resident_bytes() - before, 24 * kMiB);
  for (const auto& parameter : net->parameters())
    EXPECT_EQ(is_deferred(parameter), parameter.dim() == 2);
  materialize(net);
  EXPECT_GE(resident_bytes() - before, 256 * kMiB);
  for (const auto& parameter : net->parameters()) EXPECT_FALSE(is_deferred(parameter));
}

TEST(DeferredInit, ThePeakOfConstructionIsTheLargestParameterAndABudget) {
  reset_peak();
  const auto before = resident_bytes();
  auto net = deferred_init([] { return Layers(64); });
  EXPECT_LT(peak_bytes() - before, 4 * kMiB + 64 * kMiB);
}

TEST(DeferredInit, CountsWhatItComputesAtOnce) {
  const auto before = deferred_stats();
  const std::vector<float> outside(50000, 1.f);
  auto [plain, raw, read] = deferred_init([&] {
    auto written = torch::randn({200, 200});
    written.data_ptr<float>()[0] = 1;
    return std::tuple(torch::randn({200, 200}), written,
                      torch::from_blob(const_cast<float*>(outside.data()), {50000}).clone());
  });
  EXPECT_TRUE(is_deferred(plain));
  EXPECT_FALSE(is_deferred(raw));
  EXPECT_FALSE(is_deferred(read));
  const auto after = deferred_stats();
  EXPECT_EQ(after.computed - before.computed, 2u);
  EXPECT_GE(after.computed_bytes - before.computed_bytes, 160000 + 200000);
}

TEST(DeferredInit, MemoryIsFreedWithTheTensors) {
  const auto before = resident_bytes();
  for (int i = 0; i < 20; ++i) materialize(deferred_init([] { return torch::randn({4 << 20}); }));
  EXPECT_LT(resident_bytes() - before, 32 * kMiB);
}

TEST(DeferredInit, WeightsAreWrittenToFiles) {
  const TemporaryFolder folder;
  for (const std::string& path : {folder.path("w.safetensors"), folder.path("w.pt")}) {
    torch::manual_seed(3);
    const Layers eager(2);
    torch::manual_seed(3);
    const auto net = deferred_init([] { return Layers(2); });
    const auto parameters = named_parameters(*net);  // state_dict() would compute them
    ASSERT_TRUE(is_deferred(net->parameters()[0]));
    if (path.ends_with(".pt")) save_torch_file(path, parameters);
    else save_safetensors(path, parameters);
    const Weights written(path);
    for (const auto& [name, tensor] : named_parameters(*eager))
      EXPECT_TRUE(at::equal(written.load(name), tensor)) << path << " " << name;
  }
}

TEST(DeferredInit, AnErrorOfAnOperatorIsThatOfEagerConstruction) {
  EXPECT_THROW(deferred_init([] {
                 return torch::mm(torch::ones({300, 300}), torch::ones({2, 2}));
               }),
               c10::Error);
  EXPECT_EQ(torch::ones({300, 300}).sum().item<float>(), 90000.f) << "the scope has ended";
  EXPECT_FALSE(is_deferred(torch::ones({300, 300})));
}

TEST(DeferredInit, ScopesNestAndTheInnerOneDoesNotEndTheOuterOne) {
  const DeferredScope outer;
  deferred_init([] { return torch::ones({300, 300}); });
  const auto after = torch::ones({300, 300});
  EXPECT_FALSE(after.storage().data() == nullptr);
  EXPECT_TRUE(is_deferred(after));
}

TEST(DeferredInit, ThreadsConstructAndUseAtTheSameTime) {
  const auto expected = bits(torch::full({512, 512}, 3.f));
  const auto shared = deferred_init([] { return torch::full({512, 512}, 3.f).clone(); });
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&, t] {
      if (bits(shared) != expected) ++wrong;  // by address: one of them provides the memory
      for (int i = 0; i < 10; ++i) {
        auto generator = at::detail::createCPUGenerator(t);
        const auto mine = deferred_init([&] { return torch::randn({200, 200}, generator); });
        generator.set_current_seed(t);
        std::vector<at::Tensor> kept;
        for (int k = 0; k <= i; ++k) kept.push_back(mine);
        if (i == 0 && bits(mine) != bits(torch::randn({200, 200}, generator))) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(DeferredInitDeathTest, OtherFaultsStayFaults) {
  deferred_init([] { return torch::ones({300, 300}); });
  void* const page = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_EXIT(*static_cast<volatile int*>(page) = 1, ::testing::KilledBySignal(SIGSEGV), "");
  munmap(page, 4096);
}

}  // namespace
}  // namespace tessera::testing
