#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "harness/thrown_by.h"
#include "tessera/checkpoint_store.h"
#include "tessera/train/registries.h"
#include "tessera/weights/weights.h"
#include "train/train_fixture.h"

// model.param_dtype: the trainer's parameters in bfloat16, with float32 master weights.

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::kWrappers;

class ParamDtype : public testing::TrainFixture {
 protected:
  TrainResult train_low(int world, std::vector<std::string> overrides) {
    overrides.push_back("model.param_dtype=bfloat16");
    return train_ranks(world, std::move(overrides));
  }

  /// The master weights in a checkpoint.
  static std::map<std::string, at::Tensor> masters_of(const std::string& folder) {
    const Weights weights(folder);
    std::vector<ElementRange> requests;
    for (const auto& entry : weights.entries()) {
      const at::Tensor tensor = weights.load(entry.name);
      EXPECT_EQ(tensor.scalar_type(), at::kBFloat16) << entry.name;
      requests.push_back(whole_shard(entry.name, tensor));
    }
    std::map<std::string, at::Tensor> result;
    for (const auto& slice : Checkpoint(folder).load_slices(requests)) {
      const auto& master = slice.state.tensors.at("master");
      EXPECT_EQ(master.scalar_type(), at::kFloat) << slice.parameter;
      EXPECT_TRUE(
          at::equal(master.to(at::kBFloat16).view(-1), weights.load(slice.parameter).view(-1)))
          << slice.parameter;
      result[slice.parameter] = master.view(-1);
    }
    return result;
  }

  static void expect_same_masters(const std::string& a, const std::string& b) {
    const auto expected = masters_of(a), actual = masters_of(b);
    ASSERT_EQ(expected.size(), actual.size());
    for (const auto& [name, master] : expected)
      EXPECT_TRUE(at::equal(master, actual.at(name))) << name;
  }
};

TEST_F(ParamDtype, EveryWrapperHasTheSameBitsAndLearnsAsInFloat32) {
  const auto reference = train_ranks(1, {"train.steps=20"});
  for (const int world : {1, 2, 3}) {
    std::optional<TrainResult> first;
    std::string weights;
    for (const auto& wrapper : kWrappers) {
      const auto result = train_low(world, {wrapper, "train.steps=20"});
      const auto saved = bytes_of("out/model.safetensors");
      if (!first) {
        first = result;
        weights = saved;
      }
      EXPECT_EQ(result.losses, first->losses) << wrapper << " on " << world;
      EXPECT_TRUE(saved == weights) << wrapper << " on " << world;
    }
    testing::expect_near(first->losses, reference.losses, 2e-2);
  }
}

TEST_F(ParamDtype, ARunGoesOnWhereItEndedOnAnyNumberOfRanks) {
  for (const auto& from : kWrappers) {
    for (const char* folder : {"whole", "parts"}) fs::remove_all(folder);
    const auto whole =
        train_low(2, {from, "train.steps=12", "checkpoint.folder=whole", "train.ema.decay=0.9"});
    train_low(2, {from, "train.steps=6", "checkpoint.folder=parts", "train.ema.decay=0.9"});
    const auto rest =
        train_low(2, {from, "train.steps=12", "checkpoint.folder=parts", "train.ema.decay=0.9"});
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 6, whole.losses.end()))
        << from;
    expect_same_masters("whole/step-00000012", "parts/step-00000012");
    for (const auto& to : kWrappers) {
      fs::remove_all("other");
      // No further step: what is written is what was read.
      train_low(3, {to, "train.steps=12", "checkpoint={folder: other, from: whole/step-00000012}"});
      expect_same_masters("whole/step-00000012", "other/step-00000012");
    }
  }
}

/// Its inputs are numbers, and it has a counter.
struct CountsImpl : torch::nn::Module {
  CountsImpl()
      : layer(register_module("layer", torch::nn::Linear(2, 2))),
        calls(register_buffer("calls", torch::zeros({}, torch::kLong))),
        mean(register_buffer("mean", torch::zeros({2}))) {}
  at::Tensor forward(const at::Tensor& x) {
    EXPECT_EQ(x.scalar_type(), at::kBFloat16);
    EXPECT_EQ(mean.scalar_type(), at::kBFloat16);
    EXPECT_EQ(calls.scalar_type(), at::kLong);
    return layer(x - mean);
  }
  torch::nn::Linear layer;
  at::Tensor calls, mean;
};
TORCH_MODULE(Counts);

struct Points : Dataset {
  int64_t size() const override { return 24; }
  std::string describe() const override { return "points"; }
  Batch get(const std::vector<int64_t>& samples) const override {
    const at::Tensor i = torch::tensor(samples, torch::kLong);
    return {torch::stack({i.sin(), i.cos()}, 1), i.sin().gt(0).to(torch::kLong)};
  }
};

TEST_F(ParamDtype, InputsAndBuffersAreConvertedAndALossGetsFloat32) {
  registry::models().add<Counts>("Counts");
  registry::datasets().add<Points>("Points");
  registry::losses().add("float_cross_entropy", [](OptionReader& options) {
    options.finish();
    return [](const at::Tensor& prediction, const Batch& batch) -> Losses {
      EXPECT_EQ(prediction.scalar_type(), at::kFloat);
      return {{"loss", at::cross_entropy_loss(prediction, batch.targets)}};
    };
  });
  std::ofstream("c.yaml") << "model: {type: Counts, seed: 1}\ndata: {type: Points}\n"
                             "loss: {type: float_cross_entropy}\n"
                             "optimizer: {type: AdamW, lr: 0.1}\n"
                             "train: {steps: 6, global_batch: 12}\n";
  for (const auto& wrapper : kWrappers) {
    const auto losses = train_low(2, {wrapper}).losses;
    EXPECT_LT(losses.back(), losses.front()) << wrapper;
  }
}

TEST_F(ParamDtype, OtherValuesAreAnError) {
  EXPECT_THAT(testing::thrown_by([] { load_config("c.yaml", {"model.param_dtype=float16"}); }),
              ::testing::AllOf(HasSubstr("model.param_dtype"), HasSubstr("float16"),
                               HasSubstr("bfloat16")));
}

}  // namespace
}  // namespace tessera
