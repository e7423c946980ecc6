// Memory while weights are saved and loaded: each rank has its shards, and for a moment one whole
// tensor or one window of another host's file.

#include <filesystem>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <unistd.h>

#include "checkpoint/child.h"
#include "harness/memory.h"
#include "harness/ranks.h"
#include "tessera/fully_sharded_data_parallel.h"

namespace {

using namespace tessera;
using namespace tessera::testing;
namespace fs = std::filesystem;

[[maybe_unused]] const bool kFreedIsReturned = return_freed_blocks();
constexpr int kRanks = 4;
constexpr int64_t kLayers = 48;
constexpr int64_t kTensor = 4 * kMiB;  // bytes of a layer's weight
constexpr int64_t kModel = kLayers * kTensor;
/// The transport's buffers.
constexpr int64_t kConstant = 8 * kMiB;

struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back(
          register_module("l" + std::to_string(i),
                          torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false))));
    }
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

/// Bytes by which the process exceeds, during `body`, what it had before. All ranks are threads of
/// it, and call this together.
int64_t peak_of(ProcessGroup group, const std::function<void()>& body) {
  group.barrier();
  int64_t before = 0;
  if (group.rank() == 0) {
    ::malloc_trim(0);
    reset_peak();
    before = resident_bytes();
  }
  group.barrier();
  body();
  group.barrier();
  return group.rank() == 0 ? peak_bytes() - before : 0;
}

std::string measured(const std::string& base) {
  std::string text;
  run_ranks(kRanks, [&](ProcessGroup group, int rank) {
    Layers net;
    FullyShardedDataParallelOptions options;
    FullyShardedDataParallel<Layers> fsdp(net, group, options);
    const std::string own = base + "/host-" + std::to_string(rank / 2);
    const int64_t peaks[] = {
        peak_of(group, [&] { fsdp.save_state_dict(base + "/parts/"); }),
        peak_of(group, [&] { fsdp.load_state_dict(base + "/parts"); }),
        peak_of(group, [&] { fsdp.save_sharded_state_dict(own); }),
        peak_of(group, [&] { fsdp.load_sharded_state_dict(own); }),
    };
    if (rank == 0)
      for (const int64_t peak : peaks) text += std::to_string(peak) + " ";
  });
  return text;
}

TEST(SaveMemory, SavingAndLoadingTakeOneTensorOrOneWindowOfEachRank) {
  std::string base = (fs::temp_directory_path() / "tessera-test-XXXXXX").string();
  ASSERT_NE(::mkdtemp(base.data()), nullptr);
  const Child child([&] { return measured(base); });
  const std::string line = child.line();
  std::istringstream text(line);
  int64_t save = 0, load = 0, save_shards = 0, load_shards = 0;
  ASSERT_TRUE(text >> save >> load >> save_shards >> load_shards) << line;
  // Of each rank the message of its part, the tensor that arrives, and the tensor in file order.
  std::printf("%s\n", line.c_str());
  EXPECT_LE(save, kRanks * 3 * kTensor + kConstant) << line;
  // Each rank's shard of one tensor, which is the whole tensor where no shard ends within it.
  EXPECT_LE(load, kRanks * kTensor + kConstant) << line;
  EXPECT_LE(save_shards, kRanks * kTensor + kConstant) << line;
  // A second copy of the shards; of each rank a window that it gets and one that it sends, twice.
  constexpr int64_t kWindow = 16 * kMiB / kRanks;
  EXPECT_LE(load_shards, kModel + kRanks * 4 * kWindow + kConstant) << line;

  uint64_t total = 0, most = 0;
  for (const auto& file : fs::directory_iterator(base + "/parts")) {
    if (file.path().extension() != ".safetensors") continue;
    total += file.file_size();
    most = std::max<uint64_t>(most, file.file_size());
  }
  EXPECT_GE(total, static_cast<uint64_t>(kModel));
  EXPECT_LE(most, total / kRanks + kTensor);
  fs::remove_all(base);
}

}  // namespace
