#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "tessera/train/model_wrapper.h"
#include "tessera/train/optim_wrapper.h"
#include "tessera/train/registries.h"

namespace tessera {
namespace {

/// A parameter of float16, whose gradient is the mean of the inputs.
struct HalfImpl : torch::nn::Module {
  HalfImpl() { weight = register_parameter("weight", torch::ones({3}, torch::kHalf)); }
  at::Tensor forward(const at::Tensor& x) { return weight.to(torch::kFloat) * x; }
  at::Tensor weight;
};

TEST(OptimWrapper, AMeanOfFloat16IsInRangeAndAnInfinityOfOneRankSkipsTheStepOnAll) {
  for (const char* parallel :
       {"{type: ZeroRedundancyOptimizer}", "{type: ZeroRedundancyOptimizer, partition: whole}",
        "{type: DistributedDataParallel}"}) {
    testing::run_ranks(2, [&](ProcessGroup group, int rank) {
      const auto net = std::make_shared<HalfImpl>();
      TrainedModel model = detail::trained_model(net);
      model.loss = [net](const Batch& batch) -> Losses {
        return {{"loss", net->forward(batch.inputs).sum()}};
      };
      const ConfigNode options = parse_yaml(parallel, "test", false);
      OptionReader reader(&options, {"parallel"}, "test");
      std::string type;
      reader.read_choice("type", type, registry::parallel().names(), "");
      const auto wrapper =
          registry::parallel().read(type, reader).make({model, nullptr, group, {"SGD", {}, {}}});
      OptimWrapperOptions options_with_scale;
      options_with_scale.scaler = {.enabled = true, .dynamic = false, .init_scale = 1};
      OptimWrapper optimizer(*wrapper, options_with_scale);
      const auto step = [&](double gradient) {
        wrapper->train_step({torch::full({3}, gradient), {}, {}}, optimizer);
      };
      step(1);
      EXPECT_TRUE(optimizer.updated()) << parallel;
      step(40000);  // finite in float16, as the mean is, and the sum of two is not
      EXPECT_TRUE(optimizer.updated()) << parallel;
      EXPECT_TRUE(net->weight.isfinite().all().item<bool>()) << parallel;
      const auto before = net->weight.detach().clone();
      step(rank == 1 ? 1e5 : 1);  // rank 1's gradient is not finite in float16
      EXPECT_TRUE(optimizer.skipped()) << parallel;
      EXPECT_FALSE(optimizer.updated()) << parallel;
      EXPECT_TRUE(at::equal(net->weight, before)) << parallel << " rank " << rank;
      step(10000);  // a step that float16 can show
      EXPECT_TRUE(optimizer.updated()) << parallel;
      EXPECT_FALSE(at::equal(net->weight, before)) << parallel;
    });
  }
}

}  // namespace
}  // namespace tessera
