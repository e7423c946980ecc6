// Grammar and rules of the header; each case violates one. No files, because the parser takes text.

#include "checkpoint/io/safetensors_header.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

using testing::HasSubstr;

Header parse(const std::string& text, uint64_t data_bytes) {
  return parse_header("f.safetensors", text, data_bytes);
}

std::string refusal(const std::string& text, uint64_t data_bytes) {
  try {
    parse(text, data_bytes);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

TEST(SafetensorsHeader, ReadsWhatTheFormatAllows) {
  const Header header =
      parse(R"({"__metadata__":{"format":"pt","é":"✓"},"b":)" + entry("F32", "[2,3]", "[8,32]") +
                R"(,"scalar":)" + entry("I64", "[]", "[0,8]") + R"(,"empty":)" +
                entry("F16", "[0,7]", "[32,32]") + "}   ",
            32);
  ASSERT_EQ(header.entries.size(), 3u);
  EXPECT_EQ(header.entries[0].name, "scalar");
  EXPECT_EQ(header.entries[0].numel(), 1);
  EXPECT_TRUE(header.entries[0].shape.empty());
  EXPECT_EQ(header.entries[1].name, "b");
  EXPECT_EQ(header.entries[1].shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(header.entries[1].begin, 8u);
  EXPECT_EQ(header.entries[1].end, 32u);
  EXPECT_EQ(header.entries[2].numel(), 0);
  EXPECT_EQ(header.metadata.at("é"), "✓");
  EXPECT_TRUE(parse("{}", 0).entries.empty());
  EXPECT_TRUE(parse(R"({"__metadata__":{}})", 0).metadata.empty());
  const Header null = parse(R"({"__metadata__":null,"b":)" + entry("F32", "[2]", "[0,8]") + "}", 8);
  EXPECT_TRUE(null.metadata.empty());
  EXPECT_EQ(null.entries.size(), 1u);
}

TEST(SafetensorsHeader, KnowsEveryDtypeOfTheFormat) {
  for (const char* name :
       {"BOOL", "U8",  "I8",  "I16", "U16",     "F16",     "BF16",    "I32",     "U32",     "F32",
        "I64",  "U64", "F64", "C64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"})
    EXPECT_GT(dtype_bits(name), 0) << name;
  EXPECT_EQ(dtype_bits("f32"), 0);
  EXPECT_EQ(parse(R"({"x":)" + entry("F4", "[2]", "[0,1]") + "}", 1).entries.size(), 1u);
}

struct Refused {
  const char* what;
  std::string text;
  uint64_t data_bytes;
  const char* reason;
};

void PrintTo(const Refused& refused, std::ostream* out) { *out << refused.what; }

class SafetensorsHeaderRefuses : public testing::TestWithParam<Refused> {};

TEST_P(SafetensorsHeaderRefuses, WithAReasonThatNamesTheFile) {
  const std::string message = refusal(GetParam().text, GetParam().data_bytes);
  EXPECT_THAT(message, HasSubstr("f.safetensors"));
  EXPECT_THAT(message, HasSubstr(GetParam().reason));
}

const std::string kF32 = entry("F32", "[1]", "[0,4]");

INSTANTIATE_TEST_SUITE_P(
    Structure, SafetensorsHeaderRefuses,
    testing::Values(
        Refused{"empty", "", 0, "begin with '{'"}, Refused{"space", " {}", 0, "begin with '{'"},
        Refused{"list", "[]", 0, "begin with '{'"}, Refused{"unfinished", "{", 0, "valid JSON"},
        Refused{"two", "{}{}", 0, "valid JSON"},
        Refused{"zeros", std::string("{}\0 junk", 8), 0, "valid JSON"},
        Refused{"comment", "{/**/}", 0, "valid JSON"},
        Refused{"trailing_comma", R"({"a":)" + kF32 + ",}", 4, "valid JSON"},
        Refused{"utf8_name", "{\"\xff\":" + kF32 + "}", 4, "valid JSON"},
        Refused{"utf8_overlong", "{\"\xc0\xaf\":" + kF32 + "}", 4, "valid JSON"},
        Refused{"lone_surrogate", R"({"\ud800":)" + kF32 + "}", 4, "valid JSON"},
        Refused{"duplicate_tensor", R"({"a":)" + kF32 + R"(,"a":)" + kF32 + "}", 4,
                R"("a" occurs twice)"},
        Refused{"duplicate_escaped", R"({"a":)" + kF32 + R"(,"\u0061":)" + kF32 + "}", 4,
                R"("a" occurs twice)"},
        Refused{"duplicate_dtype",
                R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", 4,
                R"(tensor "a": the key "dtype" occurs twice)"},
        Refused{"duplicate_metadata", R"({"__metadata__":{},"__metadata__":{}})", 0, "twice"},
        Refused{"duplicate_metadata_key", R"({"__metadata__":{"k":"1","k":"2"}})", 0,
                R"("k" occurs twice)"},
        Refused{"metadata_number", R"({"__metadata__":{"k":1}})", 0, R"(key "k")"},
        Refused{"metadata_nested", R"({"__metadata__":{"k":{}}})", 0, "a string is expected"},
        Refused{"complex_no_list", R"({"__metadata__":{"complex128":"c"}})", 0,
                R"(key "complex128": the text is not a list)"},
        Refused{"complex_unknown", R"({"__metadata__":{"complex128":"[\"c\"]"}})", 0,
                "names no tensor"},
        Refused{"complex_number", R"({"__metadata__":{"complex128":"[1]"}})", 0, "names no tensor"},
        Refused{"complex_odd",
                R"({"__metadata__":{"complex128":"[\"c\"]"},"c":)" + entry("F64", "[3]", "[0,24]") +
                    "}",
                24, R"("complex128": "c"; expected a list)"},
        Refused{"complex_twice",
                R"({"__metadata__":{"complex128":"[\"c\",\"c\"]"},"c":)" +
                    entry("F64", "[2]", "[0,16]") + "}",
                16, R"("complex128": "c"; expected a list)"},
        Refused{"metadata_list", R"({"__metadata__":[]})", 0, "an object of strings"},
        Refused{"unknown_key", R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", 4,
                R"(unknown key "x")"},
        Refused{"no_dtype", R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4,
                R"("dtype" is missing)"},
        Refused{"no_shape", R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4,
                R"("shape" is missing)"},
        Refused{"no_offsets", R"({"a":{"dtype":"F32","shape":[1]}})", 4,
                R"("data_offsets" is missing)"},
        Refused{"entry_null", R"({"a":null})", 0, R"(tensor "a")"},
        Refused{"entry_list", R"({"a":[]})", 0, R"(tensor "a")"},
        Refused{"deep_lists", R"({"a":)" + std::string(1'000'000, '['), 0, R"(tensor "a")"},
        Refused{"deep_objects",
                [] {
                  std::string text;
                  for (int i = 0; i < 100'000; ++i) text += R"({"a":)";
                  return text;
                }(),
                0, R"(unknown key "a")"}),
    testing::PrintToStringParamName());

INSTANTIATE_TEST_SUITE_P(
    Values, SafetensorsHeaderRefuses,
    testing::Values(
        Refused{"unknown_dtype", R"({"a":)" + entry("F33", "[1]", "[0,4]") + "}", 4,
                R"(unknown dtype "F33")"},
        Refused{"dtype_number", R"({"a":{"dtype":32,"shape":[1],"data_offsets":[0,4]}})", 4,
                "name of a dtype"},
        Refused{"negative_size", R"({"a":)" + entry("F32", "[-1]", "[0,4]") + "}", 4,
                "the number -1"},
        Refused{"float_size", R"({"a":)" + entry("F32", "[1.0]", "[0,4]") + "}", 4,
                "the number 1.0"},
        Refused{"text_size", R"({"a":)" + entry("F32", R"(["1"])", "[0,4]") + "}", 4, "a size"},
        Refused{"bool_size", R"({"a":)" + entry("F32", "[true]", "[0,4]") + "}", 4, "a boolean"},
        Refused{"nested_shape", R"({"a":)" + entry("F32", "[[1]]", "[0,4]") + "}", 4,
                "a list where a size"},
        Refused{"huge_size", R"({"a":)" + entry("F32", "[9223372036854775808]", "[0,4]") + "}", 4,
                "a size"},
        Refused{"shape_number", R"({"a":)" + entry("F32", "1", "[0,4]") + "}", 4,
                "a list of sizes"},
        Refused{"product_overflow",
                R"({"a":)" + entry("F32", "[4294967296,4294967296]", "[0,4]") + "}", 4,
                "overflows"},
        // 2^62 elements of 4 bytes wrap to 0 bytes in 64-bit arithmetic.
        Refused{"bytes_wrap", R"({"a":)" + entry("F32", "[4611686018427387904]", "[0,0]") + "}", 0,
                "overflows"},
        Refused{"zero_hides_overflow",
                R"({"a":)" + entry("F32", "[0,4294967296,4294967296]", "[0,0]") + "}", 0,
                "overflows"},
        Refused{"half_a_byte", R"({"a":)" + entry("F4", "[3]", "[0,1]") + "}", 1, "inside a byte"},
        Refused{"one_offset", R"({"a":)" + entry("F32", "[1]", "[0]") + "}", 4, "has 1 numbers"},
        Refused{"three_offsets", R"({"a":)" + entry("F32", "[1]", "[0,4,8]") + "}", 4,
                "the number 8"},
        Refused{"offset_negative", R"({"a":)" + entry("F32", "[1]", "[-4,0]") + "}", 4,
                "the number -4"},
        Refused{"offset_huge", R"({"a":)" + entry("F32", "[1]", "[0,18446744073709551616]") + "}",
                4, "number"},
        Refused{"backwards", R"({"a":)" + entry("F32", "[1]", "[4,0]") + "}", 4,
                "[4, 0) that run backwards"},
        Refused{"beyond", R"({"a":)" + entry("F32", "[2]", "[0,8]") + "}", 4,
                "[0, 8) beyond the 4 data bytes"},
        Refused{
            "beyond_max",
            R"({"a":)" + entry("F32", "[1]", "[18446744073709551611,18446744073709551615]") + "}",
            4, "beyond"},
        Refused{"too_short", R"({"a":)" + entry("F32", "[2]", "[0,4]") + "}", 4,
                "shape [2] need 8"},
        Refused{"too_long", R"({"a":)" + entry("F32", "[]", "[0,8]") + "}", 8, "shape [] need 4"},
        Refused{"overlap",
                R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"b":)" +
                    entry("F32", "[2]", "[4,12]") + "}",
                12, R"(tensor "b" with data_offsets [4, 12) overlaps tensor "a" [0, 8))"},
        Refused{"same_bytes", R"({"a":)" + kF32 + R"(,"b":)" + kF32 + "}", 4, "overlaps"},
        Refused{"hole", R"({"a":)" + kF32 + R"(,"b":)" + entry("F32", "[1]", "[8,12]") + "}", 12,
                "hole of 4 bytes"},
        Refused{"hole_first", R"({"a":)" + entry("F32", "[1]", "[4,8]") + "}", 8,
                "hole of 4 bytes after the start"},
        Refused{"trailing", R"({"a":)" + kF32 + "}", 5, "1 trailing bytes"},
        Refused{"data_without_tensors", "{}", 8, "8 trailing bytes"},
        Refused{"empty_inside",
                R"({"a":)" + entry("F32", "[2]", "[0,8]") + R"(,"e":)" +
                    entry("F32", "[0]", "[4,4]") + "}",
                8, "overlaps"}),
    testing::PrintToStringParamName());

TEST(SafetensorsHeader, SizePrefixIsCheckedBeforeAnythingIsAllocated) {
  const auto size_of = [](std::initializer_list<int> bytes, uint64_t file_bytes) {
    unsigned char prefix[8] = {};
    std::copy(bytes.begin(), bytes.end(), prefix);
    return header_size("f", prefix, file_bytes);
  };
  EXPECT_EQ(size_of({2, 1}, 8 + 258), 258u);
  EXPECT_THROW(size_of({2, 1}, 8 + 257), UsageError);
  EXPECT_THROW(size_of({255, 255, 255, 255, 255, 255, 255, 255}, 1000), UsageError);
  // The limit itself is allowed: 100,000,000 = 0x05f5e100.
  EXPECT_EQ(size_of({0x00, 0xe1, 0xf5, 0x05}, 8 + kMaxHeaderBytes), kMaxHeaderBytes);
  EXPECT_THROW(size_of({0x01, 0xe1, 0xf5, 0x05}, uint64_t{1} << 40), UsageError);
}

TEST(SafetensorsHeader, HostileNamesDoNotReachTheTerminal) {
  const std::string message =
      refusal(R"({"\u001b[31m\n":)" + entry("F33", "[1]", "[0,4]") + "}", 4);
  EXPECT_THAT(message, HasSubstr("\\x1b[31m\\x0a"));
  EXPECT_LT(refusal(R"({")" + std::string(1'000'000, 'a') + R"(":1})", 0).size(), 1000u);
}

TEST(SafetensorsHeader, FormatsWhatItParses) {
  Header header;
  header.metadata = {{"format", "pt"}, {"quote", "\"\\\n"}};
  header.entries = {
      {"a\"b", "F32", {2, 2}, 0, 16}, {"é", "U8", {}, 16, 17}, {"none", "F16", {0}, 17, 17}};
  const std::string bytes = format_header("f", header);
  EXPECT_EQ(bytes.size() % 8, 0u);
  unsigned char prefix[8];
  std::copy(bytes.begin(), bytes.begin() + 8, prefix);
  EXPECT_EQ(header_size("f", prefix, bytes.size()), bytes.size() - 8);
  const Header again = parse(bytes.substr(8), 17);
  EXPECT_EQ(again.metadata, header.metadata);
  ASSERT_EQ(again.entries.size(), 3u);
  EXPECT_EQ(again.entries[0].name, "a\"b");
  EXPECT_EQ(again.entries[0].shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(again.entries[1].name, "é");
  header.entries[1].name = "\xff";
  EXPECT_THROW(format_header("f", header), UsageError);
}

}  // namespace
}  // namespace tessera::safetensors
