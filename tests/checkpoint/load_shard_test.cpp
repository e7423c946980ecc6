#include "tessera/weights/load_shard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adamw.h>

#include "harness/temporary_folder.h"
#include "tessera/error.h"
#include "tessera/optim/torch_optimizer_state.h"
#include "tessera/safetensors.h"
#include "tessera/weights/torch_file.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class LoadShardTest : public testing::FolderTest {
 protected:
  /// `whole` in the memory order of `like`, as one dimension.
  static at::Tensor ordered(const at::Tensor& whole, const at::Tensor& like) {
    return at::empty_strided(like.sizes(), like.strides(), whole.options())
        .copy_(whole)
        .as_strided({whole.numel()}, {1});
  }

  /// Every shard of `parameter` that two or three ranks would have.
  static std::vector<ParameterShard> shards_of(const at::Tensor& parameter) {
    std::vector<ParameterShard> shards;
    for (const int64_t world : {2, 3}) {
      const int64_t numel = parameter.numel();
      for (int64_t rank = 0; rank < world; ++rank) {
        const int64_t begin = numel * rank / world, end = numel * (rank + 1) / world;
        shards.push_back(
            {{"p", parameter.sizes().vec(), begin, end - begin, memory_strides(parameter)},
             at::zeros({end - begin}, parameter.options())});
      }
    }
    return shards;
  }

  static std::string refusal(const std::function<void()>& call) {
    try {
      call();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "nothing was thrown";
  }
};

TEST_F(LoadShardTest, ShardsHaveTheElementsOfTheWholeTensorInTheParametersOrder) {
  const at::Tensor whole = at::arange(2 * 3 * 4 * 5, at::kFloat).view({2, 3, 4, 5});
  save_safetensors(path("a.safetensors"), {{"a", whole}});
  save_torch_file(path("a.pt"), {{"a", whole}});
  const SafetensorsFile one(path("a.safetensors"));
  const TorchFile two(path("a.pt"));
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
      const auto parameter = at::empty({2, 3, 4, 5}, at::TensorOptions().dtype(type), format);
      const auto expected = ordered(whole, parameter).to(type);
      for (const TensorSource* source :
           {static_cast<const TensorSource*>(&one), static_cast<const TensorSource*>(&two)}) {
        for (const auto& shard : shards_of(parameter)) {
          load_shard(*source, "a", shard);
          EXPECT_TRUE(at::equal(shard.tensor, expected.narrow(0, shard.begin, shard.numel)))
              << type << " " << format << " " << shard.begin << " of " << source->path();
        }
        load_shard(*source, "a", whole_shard("p", parameter));
        EXPECT_TRUE(at::equal(parameter, whole.to(type)));
      }
    }
  }
  const at::Tensor gaps = at::zeros({2, 3, 4, 10}).slice(3, 0, 10, 2);
  load_shard(one, "a", whole_shard("p", gaps));
  EXPECT_TRUE(at::equal(gaps, whole));
}

TEST_F(LoadShardTest, WrongShapesAndUnequalTensorsAreNamed) {
  save_safetensors(path("a.safetensors"), {{"a", at::zeros({2, 3})}, {"b", at::eye(2, 3)}});
  const SafetensorsFile file(path("a.safetensors"));
  EXPECT_THAT(refusal([&] {
                load_shard(file, "a", whole_shard("p", at::zeros({3, 2})));
              }),
              HasSubstr("a has shape [2, 3]; expected [3, 2], that of parameter p"));
  const auto shards = shards_of(at::zeros({2, 3}));
  EXPECT_THAT(refusal([&] { check_equal_shards(file, "a", "b", shards[0], "; advice"); }),
              HasSubstr("\"b\" differs from \"a\"; advice"));
  // The last of three shards, elements 4 and 5, is 1 and 0 in `b`.
  EXPECT_THAT(refusal([&] { check_equal_shards(file, "a", "b", shards[4], ""); }),
              HasSubstr("differs"));
  check_equal_shards(file, "a", "b", shards[3], "");  // elements 2 and 3 are 0 in both
}

TEST_F(LoadShardTest, SlicesOfAnOptimizersStateAreThoseOfTheWholeState) {
  torch::nn::Conv2d model(torch::nn::Conv2dOptions(3, 4, 2));
  torch::optim::AdamW optimizer(model->parameters());
  for (auto& parameter : model->parameters()) parameter.mutable_grad() = at::rand_like(parameter);
  optimizer.step();
  const auto named = named_parameters(*model);
  save_torch_optimizer_state(state_dict(optimizer, named), path("s.pt"));
  const TorchOptimizerStateFile file(path("s.pt"));
  ASSERT_EQ(file.groups().size(), 1u);
  EXPECT_EQ(file.groups()[0].parameters, 2u);
  EXPECT_EQ(file.groups()[0].options.at("lr"), OptionValue(1e-3));
  const auto whole = file.load({"weight", "bias"});
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const auto like = model->weight.detach().clone(format);
    std::vector<ElementRange> ranges;
    for (auto& shard : shards_of(like)) {
      ranges.push_back(shard);
      ranges.back().parameter = "weight";
    }
    const auto slices = file.load_slices({"weight", "bias"}, ranges);
    ASSERT_EQ(slices.size(), ranges.size());
    for (const auto& slice : slices) {
      EXPECT_EQ(slice.state.scalars.at("step"), ScalarValue(int64_t{1}));
      for (const std::string name : {"exp_avg", "exp_avg_sq"}) {
        const auto expected = ordered(whole.state.at("weight").tensors.at(name), like);
        EXPECT_TRUE(
            at::equal(slice.state.tensors.at(name), expected.narrow(0, slice.begin, slice.numel)))
            << name << " " << format << " " << slice.begin;
      }
    }
  }
  EXPECT_THAT(refusal([&] {
                file.load_slices({"weight", "bias"}, {{"other", {2}, 0, 2}});
              }),
              HasSubstr("it has no parameter \"other\""));
  EXPECT_THAT(refusal([&] {
                file.load_slices({"weight", "bias"}, {{"weight", {3, 4, 2, 2}, 0, 48}});
              }),
              HasSubstr("weight/exp_avg has shape [4, 3, 2, 2]; expected [3, 4, 2, 2]"));
  EXPECT_THAT(refusal([&] { file.load_slices({"weight"}, {}); }),
              HasSubstr("it has 2 parameters, given are the names of 1"));
}

}  // namespace
}  // namespace tessera
