// Thousands of damaged headers, the same on every run: each is either refused with UsageError or is
// a header whose tensors cover the data exactly. Under the address sanitizer this replaces the fuzz
// target where clang is missing.

#include <random>

#include <gtest/gtest.h>

#include "checkpoint/io/safetensors_header.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

constexpr uint64_t kDataBytes = 40;

const std::string kSeeds[] = {
    R"({"__metadata__":{"format":"pt","k":"v"},)"
    R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"BF16","shape":[8],"data_offsets":[24,40]}})",
    R"({"x":{"data_offsets":[0,8],"dtype":"I64","shape":[]},)"
    R"("\u00e9":{"shape":[0,3],"dtype":"BOOL","data_offsets":[8,8]},)"
    R"("y":{"dtype":"U8","shape":[4,8],"data_offsets":[8,40]}}   )",
};

const std::string kFragments[] = {"{",
                                  "}",
                                  "[",
                                  "]",
                                  ",",
                                  ":",
                                  "\"",
                                  "\\",
                                  "0",
                                  "-1",
                                  "1e9",
                                  "18446744073709551615",
                                  "null",
                                  "true",
                                  "\"dtype\"",
                                  "\"shape\"",
                                  "\"data_offsets\"",
                                  "\"__metadata__\"",
                                  "\"F32\"",
                                  "[0,40]",
                                  "\xff",
                                  "\xc3",
                                  "\\ud800",
                                  std::string(1, '\0'),
                                  " ",
                                  "4294967296",
                                  "{\"a\":",
                                  "[[[["};

std::string mutated(std::string text, std::mt19937& random) {
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (size_t edits = 1 + below(4); edits > 0 && !text.empty(); --edits) {
    const size_t at = below(text.size());
    switch (below(6)) {
      case 0:
        text[at] = static_cast<char>(below(256));
        break;
      case 1:
        text.erase(at, 1 + below(8));
        break;
      case 2:
        text.insert(at, kFragments[below(std::size(kFragments))]);
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), below(40)));
        break;
      case 4:
        text.resize(at);
        break;
      default:
        // Offsets and shapes consist of digits, so digits are changed most often.
        if (const size_t digit = text.find_first_of("0123456789", at); digit != std::string::npos)
          text[digit] = static_cast<char>('0' + below(10));
    }
  }
  return text;
}

void expect_sound(const Header& header, uint64_t data_bytes) {
  uint64_t covered = 0;
  for (const SafetensorsEntry& entry : header.entries) {
    ASSERT_EQ(entry.begin, covered);
    ASSERT_LE(entry.begin, entry.end);
    ASSERT_EQ((entry.end - entry.begin) * 8, static_cast<uint64_t>(entry.numel()) *
                                                 static_cast<uint64_t>(dtype_bits(entry.dtype)));
    covered = entry.end;
  }
  ASSERT_EQ(covered, data_bytes);
}

TEST(SafetensorsMutation, EveryDamagedHeaderIsRefusedOrSound) {
  std::mt19937 random(20240520);
  int accepted = 0, refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const std::string text = mutated(kSeeds[static_cast<size_t>(i) % std::size(kSeeds)], random);
    try {
      const Header header = parse_header("mutated", text, kDataBytes);
      expect_sound(header, kDataBytes);
      ++accepted;
    } catch (const UsageError&) {
      ++refused;
    }
    ASSERT_FALSE(HasFatalFailure()) << "case " << i << ": " << text;
  }
  // Both outcomes must occur; otherwise the mutations change too much or too little.
  EXPECT_GT(accepted, 200);
  EXPECT_GT(refused, 10'000);
}

}  // namespace
}  // namespace tessera::safetensors
