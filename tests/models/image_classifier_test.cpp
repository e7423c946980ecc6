// The image classifier: options, shapes, SyncBatchNorm over ranks, and training on the synthetic
// images of scripts/make_synthetic_idx.py.

#include "tessera/models/image_classifier.h"

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>

#include "harness/ranks.h"
#include "harness/thrown_by.h"
#include "models/synthetic_images.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/idx_dataset.h"
#include "tessera/data/sampler.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::run_ranks;
using testing::thrown_by;

at::Tensor random_images(int64_t count) {
  return at::randn({count, 2, 9, 10}, at::make_generator<at::CPUGeneratorImpl>(3));
}

TEST(ImageClassifier, ReturnsLogitsForEveryNorm) {
  for (const char* norm : {"BatchNorm", "none"}) {
    for (const int64_t blocks : {1, 3}) {
      ImageClassifier model(ImageClassifierOptions{2, 4, blocks, 7, norm, 0});
      EXPECT_EQ(model->forward(random_images(5)).sizes(), at::IntArrayRef({5, 7}));
      model->loss(random_images(5), at::arange(5)).backward();
      for (const auto& item : model->named_parameters())
        EXPECT_TRUE(item.value().grad().defined()) << item.key();
    }
  }
  ImageClassifier model(ImageClassifierOptions{2, 4, 2, 7});
  EXPECT_TRUE(model->named_parameters().contains("blocks.1.shortcut.weight"));
  EXPECT_FALSE(model->named_parameters().contains("blocks.0.shortcut.weight"));
  EXPECT_TRUE(model->named_buffers().contains("blocks.1.norm2.running_mean"));
  EXPECT_EQ(model->named_parameters()["head.weight"].sizes(), at::IntArrayRef({7, 8}));
}

TEST(ImageClassifier, InitialWeightsDependOnTheSeedOnly) {
  torch::manual_seed(1);
  const at::Tensor before = at::rand({3});
  torch::manual_seed(1);
  ImageClassifier a(ImageClassifierOptions{1, 4, 2, 3, "BatchNorm", 5});
  EXPECT_TRUE(at::equal(at::rand({3}), before)) << "the global generator was used";
  ImageClassifier b(ImageClassifierOptions{1, 4, 2, 3, "BatchNorm", 5}),
      other(ImageClassifierOptions{1, 4, 2, 3, "BatchNorm", 6});
  for (const auto& item : a->named_parameters()) {
    EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
    if (item.value().dim() > 1)
      EXPECT_FALSE(at::equal(item.value(), other->named_parameters()[item.key()])) << item.key();
  }
}

TEST(ImageClassifier, RefusesOptionsAndInputsOutOfRange) {
  const auto made = [](const ImageClassifierOptions& options) {
    return thrown_by([&] { ImageClassifierImpl model(options); });
  };
  EXPECT_THAT(made({0, 16, 2, 10}), HasSubstr("in_channels: 0;"));
  EXPECT_THAT(made({1, 0, 2, 10}), HasSubstr("channels: 0;"));
  EXPECT_THAT(made({1, 16, 0, 10}), HasSubstr("blocks: 0;"));
  EXPECT_THAT(made({1, 16, 9, 10}), HasSubstr("blocks: 9; expected a whole number >= 1 and <= 8"));
  EXPECT_THAT(made({1, 16, 2, 1}), HasSubstr("classes: 1;"));
  EXPECT_THAT(made({1, 60000, 8, 10}), HasSubstr("expected at most 65536"));
  EXPECT_THAT(made({1, 16, 2, 10, "BatchNrom"}),
              AllOf(HasSubstr("\"BatchNrom\""), HasSubstr("did you mean \"BatchNorm\"")));
  EXPECT_THAT(made({1, 16, 2, 10, "SyncBatchNorm"}), HasSubstr("process group"));
  ImageClassifier model(ImageClassifierOptions{2, 4, 1, 3});
  EXPECT_THAT(thrown_by([&] {
                model->forward(at::zeros({1, 3, 8, 8}));
              }),
              AllOf(HasSubstr("in_channels is 2"), HasSubstr("[1, 3, 8, 8]")));
  EXPECT_THAT(thrown_by([&] { model->forward(at::zeros({2, 8, 8})); }), HasSubstr("[2, 8, 8]"));
  EXPECT_THAT(thrown_by([&] {
                model->forward(at::zeros({1, 2, 8, 8}, at::kLong));
              }),
              HasSubstr("floating-point"));
  EXPECT_THAT(thrown_by([&] { model->loss(random_images(2), at::zeros({3}, at::kLong)); }),
              HasSubstr("one for each image"));
}

TEST(ImageClassifier, SyncBatchNormOverRanksIsBatchNormOverTheWholeBatch) {
  const std::vector<int64_t> parts = {3, 1, 2};
  const at::Tensor images = random_images(6), labels = at::arange(6) % 4;
  const auto loss_sum = [](const at::Tensor& logits, const at::Tensor& targets) {
    return at::cross_entropy_loss(logits, targets, {}, at::Reduction::Sum);
  };
  ImageClassifier whole(ImageClassifierOptions{2, 4, 2, 4, "BatchNorm", 1});
  const at::Tensor expected = whole->forward(images);
  loss_sum(expected, labels).backward();
  run_ranks(3, [&](ProcessGroup group, int rank) {
    ImageClassifier part(ImageClassifierOptions{2, 4, 2, 4, "SyncBatchNorm", 1}, group);
    const int64_t begin = rank == 0 ? 0 : rank == 1 ? 3 : 4;
    const at::Tensor logits =
        part->forward(images.narrow(0, begin, parts[static_cast<size_t>(rank)]));
    EXPECT_TRUE(at::allclose(logits, expected.narrow(0, begin, logits.size(0)), 1e-4, 1e-4));
    loss_sum(logits, labels.narrow(0, begin, logits.size(0))).backward();
    for (const auto& item : part->named_parameters()) {
      at::Tensor sum = item.value().grad().contiguous();
      group.all_reduce(sum);
      EXPECT_TRUE(at::allclose(sum, whole->named_parameters()[item.key()].grad(), 1e-3, 1e-4))
          << item.key();
    }
    for (const auto& item : whole->named_buffers())
      EXPECT_TRUE(at::allclose(part->named_buffers()[item.key()].to(at::kDouble),
                               item.value().to(at::kDouble), 1e-4, 1e-5))
          << item.key();
  });
}

TEST(ImageClassifier, LearnsTheSyntheticImages) {
  const SyntheticImages synthetic;
  EXPECT_TRUE(std::filesystem::exists(synthetic.folder() + "/SYNTHETIC.txt"));
  const auto train = std::make_shared<IdxDataset>(synthetic.part("train"));
  const IdxDataset test(synthetic.part("t10k"));
  ASSERT_EQ(train->size(), 2000);
  ASSERT_EQ(test.size(), 400);
  EXPECT_EQ(test.classes(), 6);

  ImageClassifier model(ImageClassifierOptions{1, 8, 2, 6});
  EXPECT_LT(accuracy(*model, test), 0.5) << "untrained";
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-2));
  const Sampler sampler(train->size(), SampleOrder::shuffled, 1);
  BatchLoader loader(
      train, [&](int64_t step) { return sampler.samples(32 * step, 32); }, 0, 100);
  while (loader.iteration() < 100) {
    const Batch batch = loader.next();
    optimizer.zero_grad();
    model->loss(batch.inputs, batch.targets).backward();
    optimizer.step();
  }
  EXPECT_GT(accuracy(*model, test), 0.9);
}

}  // namespace
}  // namespace tessera
