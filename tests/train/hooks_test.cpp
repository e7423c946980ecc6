#include <bit>
#include <cstring>

#include <gmock/gmock.h>

#include "tessera/train/registries.h"
#include "train/hooks/crc32c.h"
#include "train_fixture.h"

namespace tessera::train {
namespace {

using ::testing::HasSubstr;

/// CRC-32C bit by bit, as RFC 3720 defines it.
uint32_t slow_crc(const std::string& bytes) {
  uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78U : crc >> 1;
  }
  return ~crc;
}

template <class Number>
Number at(const std::string& bytes, size_t offset) {
  Number value{};
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

/// The messages of a TFRecord file. Fails where a length or a checksum is wrong.
std::vector<std::string> frames(const std::string& file) {
  const auto masked = [](const std::string& bytes) {
    const uint32_t crc = slow_crc(bytes);
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
  };
  std::vector<std::string> messages;
  for (size_t offset = 0; offset < file.size();) {
    const auto length = at<uint64_t>(file, offset);
    EXPECT_EQ(at<uint32_t>(file, offset + 8), masked(file.substr(offset, 8)));
    messages.push_back(file.substr(offset + 12, length));
    EXPECT_EQ(at<uint32_t>(file, offset + 12 + length), masked(messages.back()));
    offset += length + 16;
  }
  return messages;
}

/// A protobuf message: field number to its values; varints as numbers, all else as bytes.
struct Message {
  std::multimap<uint64_t, std::string> bytes;
  std::map<uint64_t, uint64_t> varints;

  explicit Message(const std::string& text) {
    size_t i = 0;
    const auto varint = [&] {
      uint64_t value = 0;
      for (int shift = 0;; shift += 7) {
        const auto byte = static_cast<unsigned char>(text.at(i++));
        value |= static_cast<uint64_t>(byte & 0x7F) << shift;
        if (byte < 0x80) return value;
      }
    };
    while (i < text.size()) {
      const uint64_t key = varint(), field = key >> 3;
      if ((key & 7) == 0) {
        varints[field] = varint();
        continue;
      }
      const size_t length = (key & 7) == 1 ? 8 : (key & 7) == 5 ? 4 : varint();
      bytes.emplace(field, text.substr(i, length));
      i += length;
    }
  }
  std::string only(uint64_t field) const {
    return bytes.count(field) == 1 ? bytes.find(field)->second : "";
  }
};

class HooksTest : public tessera::testing::TrainFixture {
 protected:
  /// Scalars and histograms (as their counts) of all files of tb/, by tag and step.
  void read_board() {
    scalars_.clear();
    counts_.clear();
    for (const auto& entry : std::filesystem::directory_iterator("tb")) {
      for (const auto& text : frames(bytes_of(entry.path().string()))) {
        const Message event(text);
        const auto step = event.varints.count(2) > 0 ? event.varints.at(2) : 0;
        starts_ += event.bytes.count(7);
        if (event.bytes.count(5) == 0) continue;
        const Message summary(event.only(5));
        for (const auto& [field, value_text] : summary.bytes) {
          const Message value(value_text);
          if (value.bytes.count(2) > 0) {
            scalars_[value.only(1)][step] = at<float>(value.only(2), 0);
          } else {
            const Message histogram(value.only(5));
            const std::string packed = histogram.only(7);
            double sum = 0;
            for (size_t i = 0; i < packed.size(); i += 8) sum += at<double>(packed, i);
            EXPECT_EQ(sum, at<double>(histogram.only(3), 0)) << value.only(1);
            EXPECT_EQ(packed.size(), histogram.only(6).size());
            counts_[value.only(1)][step] = packed;
            totals_[value.only(1)] = sum;
          }
        }
      }
    }
  }

  std::map<std::string, std::map<uint64_t, float>> scalars_;
  std::map<std::string, std::map<uint64_t, std::string>> counts_;
  std::map<std::string, double> totals_;
  size_t starts_ = 0;
};

TEST(Crc32c, IsThatOfTheStandard) {
  EXPECT_EQ(crc32c("123456789"), 0xE3069283U);  // the check value of the catalogue of CRCs
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAU);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(""), slow_crc(""));
  for (int length = 1; length < 300; length += 13) {
    std::string bytes;
    for (int i = 0; i < length; ++i) bytes += static_cast<char>(i * i + length);
    EXPECT_EQ(crc32c(bytes), slow_crc(bytes));
  }
}

TEST_F(HooksTest, TheCsvFileHasTheFiguresOfTheLogAlsoAfterAResume) {
  const std::vector<std::string> options{"hooks=[{type: CSV, path: t.csv}]",
                                         "checkpoint={folder: k, every: 4}", "train.eval_every=3",
                                         "data.val_fraction=0.2"};
  auto first = options;
  first.push_back("train.steps=4");
  train_ranks(2, first);
  std::ofstream("t.csv", std::ios::app) << "4,0,0,0,0,0,0,0,\n5,0\n";  // after the checkpoint
  train_ranks(2, options);
  std::ifstream file("t.csv");
  std::string line;
  std::getline(file, line);
  EXPECT_EQ(line, "step,loss,grad_norm,lr,ms,tokens_per_s,samples_per_s,epoch,eval_loss");
  for (const auto& record : log()) {
    ASSERT_TRUE(std::getline(file, line));
    const std::string expected = record["step"].dump() + "," + record["loss"].dump() + ",";
    EXPECT_EQ(line.substr(0, expected.size()), expected);
    const std::string last = line.substr(line.rfind(',') + 1);
    EXPECT_EQ(last, record.contains("eval_loss") ? record["eval_loss"].dump() : "");
    EXPECT_EQ(std::count(line.begin(), line.end(), ','), 8);
  }
  EXPECT_FALSE(std::getline(file, line));
  EXPECT_EQ(log().size(), 6U);
}

TEST_F(HooksTest, TheEventFilesHaveTheFiguresOfTheLog) {
  const std::vector<std::string> options{"hooks=[{type: TensorBoard, folder: tb}]",
                                         "checkpoint={folder: k, every: 4}", "train.eval_every=3",
                                         "data.val_fraction=0.2"};
  auto first = options;
  first.push_back("train.steps=4");
  train_ranks(2, first);
  train_ranks(2, options);
  read_board();
  EXPECT_EQ(starts_, 1U);  // of the resumed run, so that TensorBoard drops repeated steps
  const auto lines = log();
  for (const auto& record : lines) {
    const auto step = record["step"].get<uint64_t>();
    EXPECT_EQ(scalars_["train/loss"][step], record["loss"].get<float>());
    EXPECT_EQ(scalars_["train/lr"][step], record["lr"].get<float>());
    if (record.contains("eval_loss") && step > 3)
      EXPECT_EQ(scalars_["eval/loss"][step], record["eval_loss"].get<float>());
  }
  EXPECT_EQ(scalars_["train/loss"].size(), lines.size());
  EXPECT_TRUE(counts_.empty());
}

TEST_F(HooksTest, HistogramsOfShardsAreThoseOfWholeParameters) {
  std::map<std::string, std::map<uint64_t, std::string>> whole;
  for (const int world : {1, 2, 3}) {
    for (const auto& wrapper : tessera::testing::kWrappers) {
      std::filesystem::remove_all("tb");
      // Steps of size 0: the parameters are the same bits with every wrapper and world.
      train_ranks(world, {wrapper, "optimizer.lr=0", "train.steps=2",
                          "hooks=[{type: TensorBoard, folder: tb, histograms_every: 2}]"});
      read_board();
      EXPECT_EQ(counts_.size(), 28U) << wrapper;
      EXPECT_EQ(totals_["parameters/transformer.wte.weight"], 256 * 16) << wrapper;
      EXPECT_EQ(counts_["parameters/transformer.wte.weight"].count(1), 1U);
      if (whole.empty()) whole = counts_;
      EXPECT_TRUE(counts_ == whole) << world << " " << wrapper;
    }
  }
}

TEST_F(HooksTest, AHookWithoutALogGetsTheRecords) {
  EXPECT_EQ(train({"c.yaml", "train.log=null", "hooks=[{type: CSV, path: t.csv}]"}), 0) << err_;
  const std::string table = bytes_of("t.csv");
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 7);
}

TEST_F(HooksTest, MistakesAreNamed) {
  const auto refused = [&](const std::string& hook) {
    EXPECT_NE(train({"c.yaml", "hooks=[" + hook + "]"}), 0);
    return err_;
  };
  EXPECT_THAT(refused("{type: CSV}"), HasSubstr("hooks.0.path"));
  EXPECT_THAT(refused("{type: Csv, path: a}"), HasSubstr("CSV"));
  EXPECT_THAT(refused("{type: CSV, path: a, folder: b}"), HasSubstr("an option of TensorBoard"));
  EXPECT_THAT(refused("{type: TensorBoard, folder: t, histograms_every: -1}"),
              HasSubstr("histograms_every: -1"));
  EXPECT_THAT(refused("{type: CSV, path: no/such/t.csv}"), HasSubstr("no/such"));
  EXPECT_THAT(refused("{type: TensorBoard, folder: text.txt}"), HasSubstr("text.txt"));
}

}  // namespace
}  // namespace tessera::train
