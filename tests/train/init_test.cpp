// model.init, optimizer.init and checkpoints: which bytes each rank reads of them; train.save:
// which it writes. (tests/integration/weights_test.py compares what arrives.)

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "tessera/checkpoint_store.h"
#include "tessera/safetensors.h"
#include "tessera/weights/torch_file.h"
#include "tessera/weights/weights_tools.h"
#include "train/train_fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

/// What this thread has read ("rchar:") or written ("wchar:") by system calls, as the kernel counts
/// it, in bytes.
int64_t kernel_counts(const std::string& wanted) {
  std::ifstream counters("/proc/thread-self/io");
  std::string name;
  for (int64_t bytes = -1; counters >> name >> bytes;)
    if (name == wanted) return bytes;
  ADD_FAILURE() << "no " << wanted << " in /proc/thread-self/io";
  return -1;
}

class InitTest : public testing::TrainFixture {
 protected:
  // Without dropout, text, or a second file, so that the weights are most of what is read.
  const std::vector<std::string> model_{
      "model.n_embd=128", "model.n_layer=3",         "train.steps=0", "train.eval_batches=1",
      "train.save=null",  "train.save_config=false", "train.log=null"};

  std::vector<std::string> with(std::vector<std::string> more) const {
    more.insert(more.begin(), model_.begin(), model_.end());
    return more;
  }

  /// Bytes that each rank's thread reads or writes in a run.
  std::vector<int64_t> bytes_of_ranks(int world, std::vector<std::string> overrides,
                                      const std::string& counter = "rchar:") {
    const Config config = load_config("c.yaml", with(std::move(overrides)));
    std::vector<int64_t> bytes(static_cast<size_t>(world));
    ::testing::internal::CaptureStdout();
    try {
      testing::run_ranks(world, [&](ProcessGroup group, int rank) {
        const int64_t before = kernel_counts(counter);
        run_training(config, group);
        bytes[static_cast<size_t>(rank)] = kernel_counts(counter) - before;
      });
    } catch (...) {
      ::testing::internal::GetCapturedStdout();
      throw;
    }
    ::testing::internal::GetCapturedStdout();
    return bytes;
  }

  /// The bytes of each rank that `init` adds to a run without it.
  std::vector<int64_t> bytes_of_init(int world, const std::string& wrapper,
                                     const std::vector<std::string>& init) {
    auto overrides = init;
    overrides.push_back(wrapper);
    const auto without = bytes_of_ranks(world, {wrapper});
    auto bytes = bytes_of_ranks(world, overrides);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] -= without[i];
    return bytes;
  }

  /// Writes the model's weights as a file, a folder of several files, and a file of torch.save.
  int64_t write_weights() {
    train_ranks(1, with({"train.save=w.safetensors"}));
    const Weights weights("w.safetensors");
    convert_weights(weights, "w.pt");
    convert_weights(weights, "w/", {.max_shard_bytes = 1'000'000});
    int64_t bytes = 0;
    for (const auto& entry : weights.entries())
      bytes += static_cast<int64_t>(entry.end - entry.begin);
    EXPECT_GT(bytes, 2'000'000);
    return bytes;
  }
};

constexpr int64_t kHeaders = 40'000;  // and what else a run reads

TEST_F(InitTest, EachRankReadsItsSlicesAlone) {
  const int64_t bytes = write_weights();
  for (const std::string init : {"w.safetensors", "w", "w.pt"}) {
    for (const int world : {2, 3}) {
      for (const std::string wrapper :
           {"parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}",
            "parallel.type=ZeroRedundancyOptimizer"}) {
        for (const int64_t rank : bytes_of_init(world, wrapper, {"model.init=" + init})) {
          EXPECT_LT(rank, bytes / world + kHeaders) << init << " " << wrapper << " " << world;
          EXPECT_GE(rank, bytes / world - kHeaders) << init << " " << wrapper << " " << world;
        }
      }
    }
  }
}

TEST_F(InitTest, RanksWithWholeParametersReadThemOnce) {
  const int64_t bytes = write_weights();
  for (const int64_t rank :
       bytes_of_init(2, "parallel.type=DistributedDataParallel", {"model.init=w.safetensors"}))
    EXPECT_NEAR(static_cast<double>(rank), static_cast<double>(bytes), kHeaders);
}

TEST_F(InitTest, FrozenShardsAreReadInSlicesToo) {
  const int64_t bytes = write_weights();
  const std::string fsdp = "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}";
  for (const int64_t rank :
       bytes_of_init(2, fsdp, {"model.init=w.safetensors", "model.freeze=transformer.h.0.**"}))
    EXPECT_LT(rank, bytes / 2 + kHeaders);
}

TEST_F(InitTest, EveryRankWritesItsPartOfAFolder) {
  const int64_t bytes = write_weights();
  for (const int world : {2, 3}) {
    const std::vector<std::string> overrides{"parallel.type=FullyShardedDataParallel",
                                             "train.save=out/", "train.max_shard_mb=1"};
    for (const int64_t rank : bytes_of_ranks(world, overrides, "wchar:")) {
      EXPECT_GT(rank, bytes / world - 300'000) << world;  // less than the largest tensor
      EXPECT_LT(rank, bytes / world + 300'000) << world;
    }
  }
}

TEST_F(InitTest, AHeadThatIsTiedIsComparedInSlices) {
  const int64_t bytes = write_weights();
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  const SafetensorsFile file("w.safetensors");
  for (const auto& name : file.names()) tensors.emplace_back(name, file.load(name));
  const at::Tensor embedding = file.load("transformer.wte.weight");
  tensors.emplace_back("lm_head.weight", embedding.clone());
  save_safetensors("head.safetensors", tensors);
  const std::string fsdp = "parallel.type=FullyShardedDataParallel";
  const auto once = static_cast<int64_t>(embedding.nbytes());
  for (const int64_t rank : bytes_of_init(2, fsdp, {"model.init=head.safetensors"}))
    EXPECT_LT(rank, bytes / 2 + 2 * once + kHeaders);  // one rank has the whole embedding
  // The last element is another rank's.
  tensors.back().second.view({-1})[-1] = 3;
  save_safetensors("head.safetensors", tensors);
  try {
    bytes_of_ranks(2, {fsdp, "model.init=head.safetensors"});
    FAIL() << "a head that differs was accepted";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("command line: model.init: "));
    EXPECT_THAT(error.what(),
                HasSubstr("\"lm_head.weight\" differs from \"transformer.wte.weight\", "
                          "but the model ties them"));
  }
}

struct TiedLayersImpl : torch::nn::Module {
  TiedLayersImpl()
      : one(register_module("one", torch::nn::Linear(3, 3))),
        two(register_module("two", torch::nn::Linear(3, 3))) {
    two->weight = two->register_parameter("tied", one->weight);
  }
  at::Tensor forward(const at::Tensor& x) { return two(one(x).tanh()); }
  torch::nn::Linear one, two;
};
TORCH_MODULE(TiedLayers);

struct Points : Dataset {
  int64_t size() const override { return 64; }
  std::string describe() const override { return "points"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong) % size();
    return {torch::stack({i.sin(), i.cos(), i * 0.01}, 1), i % 3};
  }
};

TEST_F(InitTest, ATiedWeightOfAModelOfTheProgramIsReadUnderAnyOfItsNames) {
  registry::models().add<TiedLayers>("TiedLayers");
  registry::datasets().add<Points>("Points");
  std::ofstream("c.yaml")
      << "model: {type: TiedLayers, init: w.safetensors}\n"
         "data: {type: Points}\nloss: {type: cross_entropy}\n"
         "optimizer: {type: AdamW, lr: 0.1, paramwise: {bypass_duplicate: true}}\n"
         "train: {steps: 0, global_batch: 12, save: out.safetensors}\n";
  const at::Tensor tied = at::arange(9, at::kFloat).view({3, 3});
  using Names = std::vector<std::string>;
  for (const auto& names :
       {Names{"one.weight"}, Names{"two.tied"}, Names{"one.weight", "two.tied"}}) {
    std::vector<std::pair<std::string, at::Tensor>> tensors{
        {"one.bias", at::ones({3})}, {"two.bias", at::ones({3})}, {"two.weight", at::ones({3, 3})}};
    for (const auto& name : names) tensors.emplace_back(name, tied.clone());
    save_safetensors("w.safetensors", tensors);
    for (const auto& wrapper : testing::kWrappers) {
      std::filesystem::remove("out.safetensors");
      train_ranks(2, {wrapper});
      EXPECT_TRUE(at::equal(SafetensorsFile("out.safetensors").load("one.weight"), tied))
          << wrapper << ::testing::PrintToString(names);
    }
    if (names.size() == 1) continue;
    tensors.back().second[2][2] = 3;
    save_safetensors("w.safetensors", tensors);
    for (const auto& wrapper : testing::kWrappers) {
      try {
        train_ranks(2, {wrapper});
        FAIL() << "weights that differ were accepted";
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("\"two.tied\" differs from \"one.weight\""));
      }
    }
  }
}

TEST_F(InitTest, EachRankReadsItsSlicesOfTheOptimizerState) {
  train_ranks(1, {"model.n_embd=128", "model.n_layer=3", "train.steps=1", "train.save=null",
                  "train.save_config=false", "train.save_optimizer=state.pt"});
  const auto bytes = static_cast<int64_t>(std::filesystem::file_size("state.pt"));
  EXPECT_GT(bytes, 4'000'000);
  for (const std::string wrapper :
       {"parallel.type=FullyShardedDataParallel", "parallel.type=ZeroRedundancyOptimizer"}) {
    for (const int64_t rank : bytes_of_init(2, wrapper, {"optimizer.init=state.pt"})) {
      EXPECT_LT(rank, bytes / 2 + 2 * kHeaders) << wrapper;
      EXPECT_GE(rank, bytes / 2 - 2 * kHeaders) << wrapper;
    }
  }
}

TEST_F(InitTest, ResumedRanksReadTheirSlicesAlone) {
  const std::string fsdp = "parallel={type: FullyShardedDataParallel, wrap_policy: {type: leaves}}";
  for (const bool single : {false, true}) {
    std::filesystem::remove_all("c");
    const std::string folder = fmt::format("checkpoint={{folder: c, single_file: {}}}", single);
    bytes_of_ranks(2, {fsdp, folder, "train.steps=1"});
    int64_t all = 0, weights = 0;
    const Checkpoint checkpoint(*latest_checkpoint("c"));
    for (const auto& file : checkpoint.files())
      all += static_cast<int64_t>(std::filesystem::file_size(checkpoint.path() + "/" + file));
    const Weights saved(checkpoint.path());
    for (const auto& entry : saved.entries())
      weights += static_cast<int64_t>(entry.end - entry.begin);
    for (const auto& wrapper : {fsdp, std::string("parallel.type=ZeroRedundancyOptimizer")}) {
      for (const int world : {2, 3}) {
        int64_t read = 0;
        for (const int64_t rank : bytes_of_ranks(world, {wrapper, folder, "train.steps=1"}))
          read += rank;
        for (const int64_t rank : bytes_of_ranks(world, {wrapper, "train.steps=0"})) read -= rank;
        // All ranks together compare every digest once, and read every state and weight once.
        EXPECT_NEAR(static_cast<double>(read), 2.0 * static_cast<double>(all),
                    0.3 * static_cast<double>(weights))
            << single << " " << wrapper << " " << world;
      }
    }
  }
}

}  // namespace
}  // namespace tessera
