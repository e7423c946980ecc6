// ByteText and TokenBin: the tokens that they read, and their errors for faulty files.

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"
#include "tessera/data/bigram.h"
#include "tessera/data/token_dataset.h"
#include "tessera/data/token_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using testing::thrown_by;

class Sources : public testing::FolderTest {
 protected:
  std::string put_bin(const std::string& name, int32_t magic, int32_t version, int32_t count,
                      const std::vector<uint16_t>& tokens) const {
    std::string bytes(1024, '\0');
    const int32_t header[] = {magic, version, count};
    std::copy_n(reinterpret_cast<const char*>(header), sizeof header, bytes.begin());
    bytes.append(reinterpret_cast<const char*>(tokens.data()), 2 * tokens.size());
    return put(name, bytes);
  }

  static std::string text(const Tokens& tokens) {
    std::string result;
    for (int64_t i = 0; i < tokens.size(); ++i) result += static_cast<char>(tokens[i]);
    return result;
  }
};

template <typename Source>
std::string refusal(const Source& source) {
  return thrown_by([&] { source.load(); });
}

TEST_F(Sources, ByteTextSplitsTheLastPartOffAsVal) {
  const TokenData data =
      ByteText{{put("a", std::string("0123456789\xff") + "abcdefgh")}, 0.1}.load();
  EXPECT_EQ(text(data.train),
            "0123456789\xff"
            "abcdef");  // ⌊19 · 0.9⌋ = 17
  EXPECT_EQ(text(data.val), "gh");
  EXPECT_EQ(data.train[10], 255);
  EXPECT_EQ((ByteText{{path("a")}, 0.0}.load().val.size()), 0);
  EXPECT_TRUE(at::equal(data.val.tensor(), at::tensor({103, 104}, at::kLong)));
}

TEST_F(Sources, ByteTextReadsFoldersInOrderAndSkipsLinks) {
  put("d/b", "BB");
  put("d/a", "A");
  put("d/c.txt", "CCC");
  put("d/sub/x", "no");
  fs::create_symlink("a", path("d/link"));
  EXPECT_EQ(text(ByteText{{path("d")}, 0.0}.load().train), "ABBCCC");
  EXPECT_EQ(text(ByteText{{path("d/[ab]*")}, 0.0}.load().train), "ABB");
  EXPECT_EQ(text(ByteText{{path("d/c*"), path("d/a")}, 0.0}.load().train), "CCCA");
  EXPECT_EQ(text(ByteText{{path("d/link")}, 0.0}.load().train), "A")
      << "a link that is named itself is followed";
}

TEST_F(Sources, ByteTextRefusesFaultyPathsNamingThem) {
  EXPECT_THAT(refusal(ByteText{{path("none")}}), HasSubstr(path("none") + ": no such file"));
  EXPECT_THAT(refusal(ByteText{{path("none*")}}), HasSubstr("matches no regular file"));
  EXPECT_THAT(refusal(ByteText{{put("empty", "")}}), HasSubstr("empty: holds no bytes"));
  fs::create_directory(path("d"));
  EXPECT_THAT(refusal(ByteText{{path("d")}}), HasSubstr("no regular file"));
  EXPECT_THAT(refusal(ByteText{{"/dev/null"}}), HasSubstr("neither a file nor a folder"));
  EXPECT_THAT(refusal(ByteText{{}}), HasSubstr("at least one"));
  EXPECT_THAT(refusal(ByteText{{path("empty")}, 1.0}), HasSubstr("val_fraction"));
}

TEST_F(Sources, TheDefaultPathsHoldAText) {
  const TokenData data = ByteText{}.load();
  EXPECT_GT(data.train.size(), 100'000);
  EXPECT_NEAR(static_cast<double>(data.val.size()) / static_cast<double>(data.train.size()),
              1.0 / 9, 1e-4);
  const double bigram = bigram_cross_entropy(data.train, data.val, 256);
  EXPECT_GT(bigram, 1.5);
  EXPECT_LT(bigram, 3.5);
}

TEST_F(Sources, TokenBinReadsLlmcFiles) {
  const std::string train = put_bin("t.bin", 20240520, 1, 4, {0, 50256, 7, 65535}),
                    val = put_bin("v.bin", 20240520, 1, 2, {3, 4});
  const TokenData data = TokenBin{{train}, {val}, 0}.load();
  EXPECT_TRUE(at::equal(data.train.tensor(), at::tensor({0, 50256, 7, 65535}, at::kLong)));
  EXPECT_TRUE(at::equal(data.val.tensor(), at::tensor({3, 4}, at::kLong)));
  EXPECT_EQ((TokenBin{{train}, {}, 65536}.load().val.size()), 0);
  EXPECT_THAT(refusal(TokenBin{{train}, {}, 50257}),
              HasSubstr("t.bin: token 65535 at position 3 is not below vocab_size, 50257"));
  EXPECT_THAT(refusal(TokenBin{{val}, {train}, 50257}), HasSubstr("t.bin"));
}

TEST_F(Sources, TokenBinRefusesFaultyFilesNamingThem) {
  EXPECT_THAT(refusal(TokenBin{{path("none")}, {}, 0}), HasSubstr("none: no such file"));
  EXPECT_THAT(refusal(TokenBin{{"/dev/null"}, {}, 0}), HasSubstr("neither a file nor a folder"));
  EXPECT_THAT(refusal(TokenBin{{put("short", std::string(1023, 'x'))}, {}, 0}),
              HasSubstr("1023 bytes"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("m", 20240521, 1, 1, {1})}, {}, 0}),
              HasSubstr("magic number 20240520"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("v", 20240520, 2, 1, {1})}, {}, 0}),
              HasSubstr("version 2"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("more", 20240520, 1, 1, {1, 2})}, {}, 0}),
              HasSubstr("says 1 tokens"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("less", 20240520, 1, 3, {1, 2})}, {}, 0}),
              HasSubstr("has 1028"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("neg", 20240520, 1, -2, {})}, {}, 0}),
              HasSubstr("-2 tokens"));
  EXPECT_THAT(refusal(TokenBin{{put_bin("zero", 20240520, 1, 0, {})}, {}, 0}),
              HasSubstr("zero: holds no tokens"));
  EXPECT_THAT(refusal(TokenBin{{put("empty", "")}, {}, 0}), HasSubstr("empty: has 0 bytes"));
  EXPECT_THAT(refusal(TokenBin{{}, {}, 0}), HasSubstr("at least one file"));
  put_bin("s/a.bin", 20240520, 1, 2, {1, 2});
  put_bin("s/b.bin", 20240520, 1, 2, {3, 99});
  EXPECT_THAT(refusal(TokenBin{{path("s/*.bin")}, {}, 99}),
              HasSubstr("b.bin: token 99 at position 1"));
  put("s/c.bin", "junk");
  EXPECT_THAT(refusal(TokenBin{{path("s/*.bin")}, {}, 0}), HasSubstr("c.bin: has 4 bytes"));
}

TEST_F(Sources, SeveralTokenBinFilesAreOneStream) {
  put_bin("s/2.bin", 20240520, 1, 3, {4, 5, 6});
  put_bin("s/1.bin", 20240520, 1, 1, {3});
  put_bin("s/0.bin", 20240520, 1, 3, {0, 1, 2});
  const std::string one = put_bin("one.bin", 20240520, 1, 7, {0, 1, 2, 3, 4, 5, 6});
  const Tokens shards = TokenBin{{path("s/*.bin")}, {}, 7}.load().train,
               whole = TokenBin{{one}, {}, 7}.load().train;
  EXPECT_TRUE(at::equal(shards.tensor(), whole.tensor()));
  EXPECT_TRUE(at::equal(TokenBin({{path("s")}, {}, 0}).load().train.tensor(), whole.tensor()))
      << "a folder";
  for (const int64_t seq_len : {1, 2, 3, 6}) {
    for (const bool continuous : {true, false}) {
      const TokenDataset a(shards, seq_len, continuous), b(whole, seq_len, continuous);
      for (int64_t sample = 0; sample < 30; ++sample) {
        EXPECT_TRUE(at::equal(a.get({sample}).inputs, b.get({sample}).inputs))
            << seq_len << " " << sample;
        EXPECT_TRUE(at::equal(a.get({sample}).targets, b.get({sample}).targets))
            << seq_len << " " << sample;
      }
    }
  }
}

TEST(TokensTest, SlicesAndVocabularyAreChecked) {
  const Tokens tokens = Tokens::from({1, 2, 300}, "abc");
  EXPECT_EQ(tokens.slice(1, 2, "part")[1], 300);
  EXPECT_THROW(tokens.slice(1, 3, "part"), UsageError);
  EXPECT_THROW(tokens.slice(-1, 1, "part"), UsageError);
  EXPECT_THROW(tokens.require_below(300), UsageError);
  tokens.require_below(301);
}

TEST(TokensTest, JoinedTokensAreReadAcrossTheirParts) {
  const auto bytes = std::make_shared<const std::string>("\x05\x06");
  const Tokens all =
      Tokens::joined({Tokens::from({0, 1}, "a"), Tokens(), Tokens::from({2, 3, 4}, "b"),
                      Tokens(bytes, bytes->data(), 2, 1, "c"), Tokens::from({7}, "d")},
                     "all");
  ASSERT_EQ(all.size(), 8);
  for (int64_t begin = 0; begin <= 8; ++begin) {
    for (int64_t count = 0; begin + count <= 8; ++count) {
      const Tokens part = all.slice(begin, count, "part");
      EXPECT_TRUE(at::equal(part.tensor(), at::arange(begin, begin + count)))
          << begin << " " << count;
      for (int64_t i = 0; i < count; ++i) EXPECT_EQ(part[i], begin + i);
    }
  }
  EXPECT_EQ(thrown_by([&] { all.require_below(6); }),
            "all: token 6 at position 6 is not below vocab_size, 6 (in c)");
}

}  // namespace
}  // namespace tessera
