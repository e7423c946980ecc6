// Runs the snippet of docs/data.md. tests/integration/readme_test.py checks that both are equal.

#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "harness/ranks.h"
#include "models/synthetic_images.h"
#include "tessera/models/image_classifier.h"
#include "tessera/tessera.h"

namespace documented {
namespace {

TEST(Documented, Data) {
  const tessera::SyntheticImages synthetic;
  const std::string folder = synthetic.folder();
  const tessera::IdxDataset test(synthetic.part("t10k"));
  const int64_t steps = 50;
  std::vector<std::string> weights(2);
  tessera::testing::run_ranks(2, [&](tessera::ProcessGroup group, int rank) {
    // [documented]
    auto images = std::make_shared<tessera::IdxDataset>(
        tessera::IdxOptions{.images = folder + "/train-images-idx3-ubyte",
                            .labels = folder + "/train-labels-idx1-ubyte"});
    tessera::ImageClassifier net(
        tessera::ImageClassifierOptions{.classes = images->classes(), .norm = "SyncBatchNorm"},
        group);
    tessera::DistributedDataParallel ddp(net, group);
    torch::optim::Adam adam(net->parameters(), 1e-2);

    tessera::Sampler sampler(images->size(), tessera::SampleOrder::shuffled, /*seed=*/1);
    const int64_t own = 64 / group.size();  // of a batch of 64 over all ranks
    const auto samples_of = [&](int64_t step) {
      return sampler.samples(step * 64 + group.rank() * own, own);
    };
    tessera::BatchLoader loader(images, samples_of, sampler.position() / 64, steps);
    while (loader.iteration() < steps) {
      const tessera::Batch batch = loader.next();
      adam.zero_grad();
      at::cross_entropy_loss(ddp(batch.inputs), batch.targets).backward();
      adam.step();
      sampler.seek(loader.iteration() * 64);  // a checkpoint saves sampler.state()
    }
    // [end]
    EXPECT_EQ(sampler.position(), 64 * steps);
    EXPECT_GT(tessera::accuracy(*net, test), 0.9);
    std::string& bytes = weights[static_cast<size_t>(rank)];
    for (const auto& parameter : net->parameters())
      bytes.append(static_cast<const char*>(parameter.data_ptr()), parameter.nbytes());
  });
  EXPECT_EQ(weights[0], weights[1]);
}

}  // namespace
}  // namespace documented
