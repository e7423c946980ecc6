#include "tessera/data/idx_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::thrown_by;

/// An IDX file with this header, followed by `values`.
std::string idx(const std::vector<uint32_t>& shape, const std::string& values, uint8_t type = 8) {
  std::string bytes{'\0', '\0', static_cast<char>(type), static_cast<char>(shape.size())};
  for (const uint32_t size : shape)
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(size >> shift & 0xff);
  return bytes + values;
}

std::string ramp(int count) {
  std::string values;
  for (int i = 0; i < count; ++i) values += static_cast<char>(i);
  return values;
}

class IdxFiles : public testing::FolderTest {
 protected:
  std::string refused(const std::string& images, const std::string& labels = idx({2}, "\x01\x02"),
                      int64_t classes = 0) {
    return thrown_by([&] { IdxDataset({put("images", images), put("labels", labels), classes}); });
  }

  const std::string good_ = idx({2, 2, 3}, ramp(12));
};

TEST_F(IdxFiles, ImagesBecomeFloatInputsAndLabelsInt64Targets) {
  const IdxDataset data({put("i", idx({3, 2, 2}, std::string("\x00\xff\x33\x01", 4) + ramp(8))),
                         put("l", idx({3}, std::string("\x00\x09\xff", 3)))});
  EXPECT_EQ(data.size(), 3);
  EXPECT_EQ(data.channels(), 1);
  EXPECT_EQ(data.classes(), 256);
  EXPECT_EQ(data.tokens_per_sample(), 0);
  const Batch batch = data.get({2, 0, 4});
  EXPECT_EQ(batch.inputs.scalar_type(), at::kFloat);
  ASSERT_EQ(batch.inputs.sizes(), at::IntArrayRef({3, 1, 2, 2}));
  EXPECT_TRUE(at::equal(batch.targets, at::tensor({255, 0, 9}, at::kLong)))
      << "sample 4 is sample 1";
  EXPECT_TRUE(at::equal(batch.inputs[1].flatten(),
                        at::tensor({0.0F, 255 / 255.0F, 51 / 255.0F, 1 / 255.0F})));
  EXPECT_TRUE(at::equal(batch.inputs[0].flatten(), at::arange(4, 8).to(at::kFloat) / 255));
  EXPECT_TRUE(at::equal(batch.inputs[2].flatten(), at::arange(0, 4).to(at::kFloat) / 255));
  EXPECT_EQ(data.get({}).inputs.sizes(), at::IntArrayRef({0, 1, 2, 2}));
  EXPECT_THAT(thrown_by([&] { data.get({-1}); }), HasSubstr("sample -1"));
  EXPECT_THAT(data.describe(), AllOf(HasSubstr(path("i")), HasSubstr("3 images of 1 x 2 x 2")));
}

TEST_F(IdxFiles, AFileOfFourDimensionsHasChannels) {
  const IdxDataset data({put("i", idx({2, 3, 1, 2}, ramp(12))), put("l", idx({2}, "\x01\x02"))});
  EXPECT_EQ(data.channels(), 3);
  EXPECT_EQ(data.height(), 1);
  EXPECT_EQ(data.width(), 2);
  const at::Tensor expected = at::arange(12).to(at::kFloat).view({2, 3, 1, 2}) / 255;
  EXPECT_TRUE(at::equal(data.get({0, 1}).inputs, expected));
}

TEST_F(IdxFiles, RefusesFilesThatAreNotImageFiles) {
  EXPECT_THAT(thrown_by([&] {
                IdxDataset({path("none"), path("none")});
              }),
              HasSubstr("none: cannot be opened"));
  EXPECT_THAT(thrown_by([&] {
                IdxDataset({folder_.path(), path("none")});
              }),
              HasSubstr("not a regular file"));
  EXPECT_THAT(refused(""), HasSubstr("images: is empty"));
  EXPECT_THAT(refused("\x1f\x8b\x08"), HasSubstr("images: is compressed by gzip"));
  EXPECT_THAT(refused(good_.substr(0, 3)), HasSubstr("has 3 bytes, fewer than an IDX header"));
  EXPECT_THAT(refused("\x89PNG" + good_), HasSubstr("does not begin with two zero bytes"));
  EXPECT_THAT(refused(idx({2, 2, 3}, ramp(48), 0x0d)), HasSubstr("IDX type 13, expected 8"));
  EXPECT_THAT(refused(idx({2, 6}, ramp(12))), HasSubstr("has 2 dimensions, expected 3 or 4"));
  EXPECT_THAT(refused(good_, idx({2, 1}, "ab")), HasSubstr("labels: has 2 dimensions, expected 1"));
  EXPECT_THAT(refused(good_.substr(0, 15)), HasSubstr("has 15 bytes, its header alone 16"));
}

TEST_F(IdxFiles, RefusesSizesThatDoNotMatchTheFile) {
  EXPECT_THAT(refused(good_.substr(0, good_.size() - 1)),
              HasSubstr("says 2 x 2 x 3 bytes; 11 follow it"));
  EXPECT_THAT(refused(good_ + "x"), HasSubstr("13 follow it"));
  EXPECT_THAT(refused(idx({0, 2, 3}, "")), HasSubstr("holds nothing"));
  EXPECT_THAT(refused(idx({2, 0, 3}, "")), HasSubstr("holds nothing"));
  // Products that overflow 64 bits.
  EXPECT_THAT(refused(idx({0x80000000, 0x80000000, 4}, "")), HasSubstr("0 follow it"));
  EXPECT_THAT(refused(idx({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, "x")),
              HasSubstr("1 follow it"));
}

TEST_F(IdxFiles, RefusesLabelsThatDoNotMatchImagesOrClasses) {
  EXPECT_THAT(refused(good_, idx({3}, "abc")),
              AllOf(HasSubstr("labels: 3 labels for the 2 images of " + path("images"))));
  EXPECT_THAT(refused(good_, idx({2}, "\x01\x02"), 2),
              HasSubstr("label 2 at position 1 is not below the number of classes, 2"));
  EXPECT_EQ(refused(good_, idx({2}, "\x01\x02"), 3), "no error");
}

}  // namespace
}  // namespace tessera
