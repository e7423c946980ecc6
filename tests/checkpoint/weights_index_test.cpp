// Weights in several files: the index that names them, and how tensors are divided over the files.

#include <numeric>

#include "checkpoint/store_fixture.h"
#include "harness/temporary_folder.h"
#include "tessera/safetensors_weights.h"
#include "tessera/weights/weights.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;

class WeightsIndexTest : public StoreTest {
 protected:
  std::string at_base(const std::string& name) const { return base_ + "/" + name; }
  std::string index_path() const { return at_base(kWeightsIndexName); }

  /// "a" and "b" in file 1, "c" in file 2, with an index.
  void write_two() {
    save_safetensors(at_base("model-00001-of-00002.safetensors"),
                     {{"a", at::arange(6, at::kFloat).view({2, 3})}, {"b", at::ones({2})}});
    save_safetensors(at_base("model-00002-of-00002.safetensors"), {{"c", at::full({3}, 7.0)}});
    put_index(44, "");
  }
  /// `more`: entries of weight_map before the three.
  void put_index(int64_t total, const std::string& more, const std::string& file_of_c = "2") {
    put_contents(index_path(), "{\"metadata\": {\"total_size\": " + std::to_string(total) +
                                   "}, \"weight_map\": {" + more +
                                   "\"a\": \"model-00001-of-00002.safetensors\", "
                                   "\"b\": \"model-00001-of-00002.safetensors\", "
                                   "\"c\": \"model-0000" +
                                   file_of_c + "-of-00002.safetensors\"}}");
  }
  std::string error() const {
    return usage_error([&] { Weights{base_}; });
  }
  /// What opening the folder logs.
  std::string logged() const {
    ::testing::internal::CaptureStdout();
    EXPECT_NO_THROW(Weights{base_});
    return ::testing::internal::GetCapturedStdout();
  }
};

TEST_F(WeightsIndexTest, AFolderAnIndexAndAFileAreReadAlike) {
  write_two();
  for (const auto& path : {base_, index_path()}) {
    const Weights weights(path);
    EXPECT_EQ(weights.path(), index_path());
    EXPECT_EQ(weights.entries().size(), 3u);
    EXPECT_TRUE(at::equal(weights.load("a"), at::arange(6, at::kFloat).view({2, 3})));
    EXPECT_TRUE(at::equal(weights.load("c"), at::full({3}, 7.0)));
    at::Tensor part = at::empty({2});
    weights.load_slice("a", 3, 2, part);
    EXPECT_TRUE(at::equal(part, at::arange(3, 5, at::kFloat)));
    EXPECT_THAT(usage_error([&] { weights.load("cc"); }),
                AllOf(HasSubstr(index_path()), HasSubstr("no tensor \"cc\"")));
  }
  const Weights one(at_base("model-00002-of-00002.safetensors"));
  EXPECT_EQ(one.entries().size(), 1u);
  fs::remove(index_path());
  EXPECT_THAT(error(), HasSubstr("the folder has no weights"));
  save_safetensors(at_base("weights.safetensors"), {{"w", at::ones({1})}});
  EXPECT_TRUE(Weights(base_).contains("w"));
}

TEST_F(WeightsIndexTest, AnIndexThatDoesNotFitItsFilesIsRefusedByName) {
  write_two();
  put_index(44, "\"d\": \"model-00002-of-00002.safetensors\", ");
  EXPECT_THAT(error(), AllOf(HasSubstr("\"d\""), HasSubstr("model-00002-of-00002.safetensors"),
                             HasSubstr("does not have it")));
  put_index(44, "\"d\": \"other.safetensors\", ");
  EXPECT_THAT(error(), AllOf(HasSubstr("/other.safetensors"), HasSubstr("No such file"),
                             HasSubstr("lists it")));
  put_index(44, "\"c\": \"model-00001-of-00002.safetensors\", ");
  EXPECT_THAT(error(), HasSubstr("\"c\" is given twice"));
  put_index(44, "", "1");
  EXPECT_THAT(error(), AllOf(HasSubstr("\"c\""), HasSubstr("does not have it")));
  put_index(44, "");
  fs::remove(at_base("model-00002-of-00002.safetensors"));
  EXPECT_THAT(error(), AllOf(HasSubstr("/model-00002-of-00002.safetensors"),
                             HasSubstr("No such file"), HasSubstr(index_path() + " lists it")));
}

/// As transformers reads them.
TEST_F(WeightsIndexTest, AnIndexThatIsWrongOtherwiseIsReadWithALineInTheLog) {
  write_two();
  EXPECT_EQ(logged(), "");
  put_index(45, "");
  EXPECT_THAT(logged(), AllOf(HasSubstr("total_size of " + index_path() + " is 45"),
                              HasSubstr("have 44 bytes")));
  save_safetensors(at_base("model-00002-of-00002.safetensors"),
                   {{"c", at::ones({3})}, {"b", at::full({2}, 9.0)}});
  put_index(52, "");
  EXPECT_THAT(logged(),
              HasSubstr("model-00002-of-00002.safetensors has tensor \"b\", which is read "
                        "from model-00001-of-00002.safetensors"));
  EXPECT_TRUE(at::equal(Weights(base_).load("b"), at::ones({2})));
  EXPECT_EQ(Weights(base_).entries().size(), 3u);
  save_safetensors(at_base("model-00002-of-00002.safetensors"),
                   {{"c", at::ones({3})}, {"x", at::full({2}, 5.0)}});
  EXPECT_THAT(logged(), HasSubstr("has tensor \"x\", which " + index_path() + " lacks"));
  EXPECT_TRUE(at::equal(Weights(base_).load("x"), at::full({2}, 5.0)));
  save_safetensors(at_base("model.safetensors"), {{"a", at::zeros({1})}});
  EXPECT_THAT(logged(), AllOf(HasSubstr(at_base("model.safetensors") + " is read"),
                              HasSubstr(index_path() + " is there, too")));
  EXPECT_TRUE(at::equal(Weights(base_).load("a"), at::zeros({1})));
}

TEST_F(WeightsIndexTest, ALinkOutOfTheFolderIsNamed) {
  write_two();
  const testing::TemporaryFolder other;
  const std::string part = at_base("model-00002-of-00002.safetensors");
  fs::rename(part, other.path("private.safetensors"));
  fs::create_symlink(other.path("private.safetensors"), part);
  EXPECT_THAT(logged(), HasSubstr(part + " is a link to " + other.path("private.safetensors")));
  // In Hugging Face's cache every file is a link.
  fs::create_directories(at_base("m/blobs"));
  fs::create_directories(at_base("m/snapshots/1"));
  save_safetensors(at_base("m/blobs/0123"), {{"a", at::ones({2})}});
  fs::create_symlink("../../blobs/0123", at_base("m/snapshots/1/model.safetensors"));
  ::testing::internal::CaptureStdout();
  EXPECT_TRUE(Weights(at_base("m/snapshots/1")).contains("a"));
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "");
}

TEST_F(WeightsIndexTest, FilesOutsideOfTheFolderAreRefused) {
  write_two();
  for (const std::string file :
       {"../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "x.pkl",
        ".x.safetensors", "a\\\\b.safetensors", "a\\u0000.safetensors"}) {
    put_index(44, "\"d\": \"" + file + "\", ");
    EXPECT_THAT(error(), AllOf(HasSubstr(index_path()), HasSubstr("gives tensor \"d\" the file"),
                               HasSubstr("expected the plain name")))
        << file;
  }
}

TEST_F(WeightsIndexTest, TextsThatAreNoIndexAreRefused) {
  const auto refused = [&](const std::string& text) {
    return usage_error([&] { parse_weights_index("i", text); });
  };
  EXPECT_THAT(refused("{"), HasSubstr("i: is not JSON"));
  for (const char* text : {"[]", "3", "{}", "{\"weight_map\": []}", "{\"weight_map\": {}}"})
    EXPECT_THAT(refused(text), HasSubstr("i: has no weight_map")) << text;
  EXPECT_THAT(refused("{\"weight_map\": {\"a\": 3}}"), HasSubstr("\"a\" no file name"));
  for (const char* total : {"-1", "\"1\"", "1e300", "null"}) {
    EXPECT_FALSE(parse_weights_index("i", "{\"metadata\": {\"total_size\": " + std::string(total) +
                                              "}, \"weight_map\": {\"a\": \"a.safetensors\"}}")
                     .total_size)
        << total;
  }
  EXPECT_EQ(*parse_weights_index("i",
                                 "{\"metadata\": {\"total_size\": 4.0}, \"weight_map\": {\"a\": "
                                 "\"a.safetensors\"}}")
                 .total_size,
            4u);
}

TEST(DivideWeights, NoRankGetsMoreThanItsPartAndOneTensor) {
  for (const int ranks : {1, 2, 3, 4, 7, 64}) {
    for (const int count : {0, 1, 2, 5, 63, 200}) {
      std::vector<SafetensorsSpec> tensors;
      uint64_t total = 0, largest = 0;
      for (int i = 0; i < count; ++i) {
        const int64_t size = i % 9 == 0 ? 0 : (i * 7919) % 1000 + (i % 13 == 0 ? 40000 : 0);
        tensors.push_back({"t" + std::to_string(i), at::kFloat, {size}});
        total += static_cast<uint64_t>(size) * 4;
        largest = std::max(largest, static_cast<uint64_t>(size) * 4);
      }
      const auto parts = divide_weights(tensors, ranks);
      ASSERT_EQ(parts.size(), static_cast<size_t>(std::clamp(count, 1, ranks)));
      std::vector<int> seen(tensors.size());
      for (const auto& part : parts) {
        EXPECT_LE(part.bytes, total / ranks + largest) << ranks << " ranks, " << count;
        EXPECT_EQ(part.tensors.empty(), count == 0);
        for (const size_t i : part.tensors) ++seen[i];
      }
      EXPECT_EQ(seen, std::vector<int>(tensors.size(), 1));
    }
  }
  const std::vector<SafetensorsSpec> tensors{
      {"a", at::kFloat, {4}}, {"b", at::kFloat, {4}}, {"buffer", at::kLong, {1}}};
  const auto parts = divide_weights(tensors, 2, 2);
  EXPECT_EQ(parts[0].tensors, (std::vector<size_t>{1, 2}));
  EXPECT_EQ(parts[1].tensors, (std::vector<size_t>{0}));
  EXPECT_EQ(parts[1].file, "model-00002-of-00002.safetensors");
  const auto index = parse_weights_index("i", weights_index_text(tensors, parts));
  EXPECT_EQ(index.files.at("buffer"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(*index.total_size, 40u);
}

}  // namespace
}  // namespace tessera
