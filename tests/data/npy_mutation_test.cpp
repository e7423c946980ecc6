// Damaged .npy files. Each is either read as its header says or refused with a message that names
// it, and no byte outside the file is read.

#include <random>

#include <gtest/gtest.h>
#include <torch/types.h>

#include "data/npy_files.h"
#include "data/npy_header.h"
#include "harness/temporary_folder.h"
#include "tessera/data/npy_array.h"
#include "tessera/error.h"

namespace tessera {
namespace {

class NpyMutations : public testing::FolderTest {
 protected:
  /// Returns true if the file is read. The values must lie within the file.
  bool read_or_refused(const std::string& bytes) {
    const std::string file = put("m.npy", bytes);
    try {
      const NpyArray array = NpyArray::open(file);
      const at::Tensor all = array.gather({0, array.shape[0] - 1}, at::kFloat);
      EXPECT_LE(all.numel(), 2 * static_cast<int64_t>(bytes.size()));
      return true;
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(file), std::string::npos) << error.what();
      return false;
    }
  }

  const std::string good_ = npy("<i2", "3, 2", "abcdefghijkl");
};

TEST_F(NpyMutations, EveryTruncationIsRefused) {
  ASSERT_TRUE(read_or_refused(good_));
  for (size_t size = 0; size < good_.size(); ++size)
    EXPECT_FALSE(read_or_refused(good_.substr(0, size))) << size;
}

TEST_F(NpyMutations, ChangedHeadersAreReadOrRefused) {
  std::mt19937 random(1);
  const size_t header = good_.size() - 12;
  const std::string likely = "{}()[],:'\"0123456789<>|fiub \n";
  int read = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string bytes = good_;
    for (unsigned changes = 1 + random() % 3; changes > 0; --changes) {
      const size_t place = random() % std::min(header, bytes.size());
      const char to =
          random() % 2 == 0 ? likely[random() % likely.size()] : static_cast<char>(random() % 256);
      switch (random() % 3) {
        case 0:
          bytes[place] = to;
          break;
        case 1:
          bytes.erase(place, 1 + random() % 8);
          break;
        default:
          bytes.insert(place, 1, to);
      }
    }
    // Parsed in memory of exactly the file's size, so that a sanitizer detects any access outside.
    // Every 100th is also read through a file, including its values.
    const std::vector<char> exact(bytes.begin(), bytes.end());
    try {
      const NpyHeader parsed = parse_npy_header("m.npy", {exact.data(), exact.size()});
      EXPECT_LE(parsed.data_begin, static_cast<int64_t>(exact.size()));
      EXPECT_LE(parsed.shape.size(), 32u);
      ++read;
    } catch (const UsageError& error) {
      EXPECT_EQ(std::string(error.what()).rfind("NpyDataset: m.npy: ", 0), 0u) << error.what();
    }
    if (i % 100 == 0) read_or_refused(bytes);
  }
  EXPECT_GT(read, 0);
  EXPECT_LT(read, 15000);
}

}  // namespace
}  // namespace tessera
