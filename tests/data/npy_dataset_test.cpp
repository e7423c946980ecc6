#include "tessera/data/npy_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/types.h>

#include "data/npy_files.h"
#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::thrown_by;

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), sizeof(T) * values.size());
}

class NpyFiles : public testing::FolderTest {
 protected:
  NpyDataset data(const std::string& inputs, const std::string& targets) const {
    return NpyDataset({put("x.npy", inputs), put("y.npy", targets)});
  }
  std::string refused(const std::string& inputs) const {
    return thrown_by([&] { NpyArray::open(put("x.npy", inputs)); });
  }
  /// Reads a file of two values of this type, as inputs and as targets.
  void expect_values(const std::string& type, const std::string& values, const at::Tensor& expected,
                     at::ScalarType targets) const {
    const Batch batch = data(npy(type, "2,", values), npy(type, "2,", values)).get({0, 1});
    EXPECT_EQ(batch.inputs.scalar_type(), at::kFloat) << type;
    EXPECT_EQ(batch.targets.scalar_type(), targets) << type;
    EXPECT_TRUE(at::equal(batch.inputs, expected.to(at::kFloat))) << type;
    EXPECT_TRUE(at::equal(batch.targets, expected.to(targets))) << type;
  }
};

TEST_F(NpyFiles, EachTypeIsConverted) {
  const at::Tensor numbers = at::tensor({-3, 100}, at::kLong),
                   halves = at::tensor({-1.5, 0.25}, at::kDouble);
  expect_values("<f2", bytes_of<c10::Half>({c10::Half(-1.5F), c10::Half(0.25F)}), halves,
                at::kFloat);
  expect_values("<f4", bytes_of<float>({-1.5F, 0.25F}), halves, at::kFloat);
  expect_values("<f8", bytes_of<double>({-1.5, 0.25}), halves, at::kFloat);
  expect_values("|i1", bytes_of<int8_t>({-3, 100}), numbers, at::kLong);
  expect_values("<i2", bytes_of<int16_t>({-3, 100}), numbers, at::kLong);
  expect_values("<i4", bytes_of<int32_t>({-3, 100}), numbers, at::kLong);
  expect_values("<i8", bytes_of<int64_t>({-3, 100}), numbers, at::kLong);
  expect_values("|u1", bytes_of<uint8_t>({200, 0}), at::tensor({200, 0}, at::kLong), at::kLong);
  expect_values("|b1", bytes_of<uint8_t>({7, 0}), at::tensor({1, 0}, at::kLong), at::kLong);
  const int64_t large = (int64_t{1} << 62) + 1;
  EXPECT_EQ(data(npy("|u1", "1,", "a"), npy("<i8", "1,", bytes_of<int64_t>({large})))
                .get({0})
                .targets.item<int64_t>(),
            large);
}

TEST_F(NpyFiles, SamplesAreRowsOfAnyShape) {
  std::vector<float> values(24);
  std::iota(values.begin(), values.end(), 0.0F);
  const NpyDataset rows = data(npy("<f4", "4, 2, 3", bytes_of(values)),
                               npy("<i2", "4, 1", bytes_of<int16_t>({5, 6, 7, 8})));
  EXPECT_EQ(rows.size(), 4);
  const Batch batch = rows.get({3, 0, 5});
  const at::Tensor all = at::arange(24).to(at::kFloat).view({4, 2, 3});
  EXPECT_TRUE(at::equal(batch.inputs, at::stack({all[3], all[0], all[1]})))
      << "sample 5 is sample 1";
  EXPECT_TRUE(at::equal(batch.targets, at::tensor({8, 5, 6}, at::kLong).view({3, 1})));
  EXPECT_EQ(rows.get({}).inputs.sizes(), at::IntArrayRef({0, 2, 3}));
  EXPECT_THAT(thrown_by([&] { rows.get({-1}); }), HasSubstr("sample -1"));
  EXPECT_THAT(rows.describe(), AllOf(HasSubstr("f4 4 x 2 x 3"), HasSubstr("i2 4 x 1")));
  EXPECT_THAT(thrown_by([&] { data(npy("|u1", "2", "ab"), npy("|u1", "3,", "abc")); }),
              HasSubstr("3 targets for the 2 inputs of " + path("x.npy")));
}

TEST_F(NpyFiles, EveryVersionAndSpellingOfTheHeaderIsRead) {
  for (const int version : {1, 2, 3}) {
    EXPECT_EQ(NpyArray::open(put("x", npy("|u1", "2, 3", "abcdef", version))).shape,
              (std::vector<int64_t>{2, 3}));
  }
  for (const char* dictionary :
       {"{\"shape\":(2,),\"fortran_order\":False,\"descr\":\"|u1\"}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (2, ), }",
        "  { 'shape' : ( 2 ) , 'descr' : '|u1' , 'fortran_order' : False } "}) {
    EXPECT_EQ(NpyArray::open(put("x", npy_of(dictionary, "ab"))).shape, std::vector<int64_t>{2})
        << dictionary;
  }
}

TEST_F(NpyFiles, RefusesFilesThatAreNotSupportedArrays) {
  EXPECT_THAT(thrown_by([&] { NpyArray::open(path("none")); }),
              HasSubstr("none: cannot be opened"));
  EXPECT_THAT(refused(""), HasSubstr("x.npy: is empty"));
  EXPECT_THAT(refused("PK\x03\x04"), HasSubstr(".npz"));
  EXPECT_THAT(refused("0.5 0.25 1.0"), HasSubstr("is not a .npy file"));
  EXPECT_THAT(refused(npy("|u1", "2,", "ab").substr(0, 9)),
              HasSubstr("has 9 bytes, fewer than a header"));
  EXPECT_THAT(refused(npy("|u1", "2,", "ab", 4)), HasSubstr("version 4.0"));
  EXPECT_THAT(refused(npy("|u1", "2,", "ab").substr(0, 60)), HasSubstr("50 follow"));
  EXPECT_THAT(refused(npy(">f4", "1,", "abcd")), HasSubstr("\">f4\", expected <f2"));
  EXPECT_THAT(refused(npy("<c8", "1,", "abcdefgh")), HasSubstr("is of type \"<c8\""));
  EXPECT_THAT(refused(npy("|O", "1,", "abcdefgh")), HasSubstr("is of type \"|O\""));
  EXPECT_THAT(
      refused(npy_of("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,), }", "abcd")),
      HasSubstr("structured"));
  EXPECT_THAT(refused(npy_of("{'descr': '|u1', 'fortran_order': True, 'shape': (2, 1), }", "ab")),
              HasSubstr("x.npy: is in Fortran order"));
}

TEST_F(NpyFiles, RefusesSizesThatDoNotMatchTheFile) {
  EXPECT_THAT(refused(npy("<f4", "3,", std::string(11, 'x'))),
              HasSubstr("3 of type f4 makes 12 bytes; 11 follow"));
  EXPECT_THAT(refused(npy("<f4", "3,", std::string(13, 'x'))), HasSubstr("13 follow"));
  EXPECT_THAT(refused(npy("<f4", "0, 3", "")), HasSubstr("holds nothing: its shape is 0 x 3"));
  EXPECT_THAT(refused(npy("<f4", "", "abcd")), HasSubstr("single number"));
  EXPECT_THAT(refused(npy("<f8", "4611686018427387904, 4", "")), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(refused(npy("<f8", "9223372036854775807,", "")), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(refused(npy("<f8", "9223372036854775808,", "")), HasSubstr("to 2^63 - 1"));
}

TEST_F(NpyFiles, RefusesHeadersThatNumPyDoesNotWrite) {
  const auto header = [&](const std::string& dictionary) {
    return refused(npy_of(dictionary, "ab"));
  };
  EXPECT_THAT(header(""), HasSubstr("expected a dictionary"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': False, }"), HasSubstr("shape is missing"));
  EXPECT_THAT(header("{'descr': '|u1', 'shape': (2,), }"), HasSubstr("fortran_order is missing"));
  EXPECT_THAT(header("{'fortran_order': False, 'shape': (2,), }"), HasSubstr("descr is missing"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': 0, 'shape': (2,), }"),
              HasSubstr("neither True nor False"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': False, 'shape': (-2,), }"),
              HasSubstr("expected dimensions from 0"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), 'more': 1}"),
              HasSubstr("other keys"));
  EXPECT_THAT(header("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), } x"),
              HasSubstr("expected a dictionary"));
  EXPECT_THAT(header("{'descr"), HasSubstr("expected a dictionary"));
  std::string deep = "1";
  for (int i = 0; i < 5000; ++i) deep += ", 1";
  EXPECT_THAT(refused(npy("|u1", deep, "a")), HasSubstr("more than 32 dimensions"));
  const std::string long_header = npy_of("{" + std::string(70000, ' '), "ab", 2);
  EXPECT_THAT(refused(long_header),
              AllOf(HasSubstr("65535 are the most"), ::testing::SizeIs(::testing::Lt(500u))));
  std::string huge = npy("|u1", "2,", "ab", 2);
  huge.replace(8, 4, "\xff\xff\xff\xff");
  EXPECT_THAT(refused(huge), HasSubstr("4294967295 bytes"));
}

}  // namespace
}  // namespace tessera
