// Mapped files that become shorter while they are in use.

#include <csignal>
#include <filesystem>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "data/npy_files.h"
#include "harness/temporary_folder.h"
#include "tessera/data/batch_loader.h"
#include "tessera/data/idx_dataset.h"
#include "tessera/data/npy_dataset.h"
#include "tessera/data/token_dataset.h"
#include "tessera/data/token_source.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kTokens = 20'000;

class MappedFiles : public testing::FolderTest {
 protected:
  std::string put_tokens(const std::string& name) const {
    std::string bytes(1024 + 2 * kTokens, '\1');
    const int32_t header[] = {20240520, 1, kTokens};
    std::copy_n(reinterpret_cast<const char*>(header), sizeof header, bytes.begin());
    return put(name, bytes);
  }

  /// The message of the Error that `call` throws.
  static std::string error_of(const std::function<void()>& call) {
    try {
      call();
    } catch (const UsageError& error) {
      return std::string("a UsageError: ") + error.what();
    } catch (const Error& error) {
      return error.what();
    }
    return "no error";
  }
};

TEST_F(MappedFiles, ATokenFileThatWasShortenedIsAnErrorWithItsName) {
  const std::string file = put_tokens("t.bin");
  const TokenDataset data(TokenBin{{file}, {}, 0}.load().train, 100, false);
  EXPECT_EQ(data.get({data.size() - 1}).inputs[0][0].item<int64_t>(), 0x101);
  fs::resize_file(file, 5000);
  const std::string message = "TokenBin: " + file + " was shortened from 41024 to 5000 bytes";
  EXPECT_THAT(error_of([&] { data.get({data.size() - 1}); }), HasSubstr(message));
  EXPECT_THAT(error_of([&] { data.get({0}); }), HasSubstr(message))
      << "no value of the file is used after it has changed";
  const Tokens tokens = TokenBin{{put_tokens("other.bin")}, {}, 0}.load().train;
  EXPECT_EQ(error_of([&] { tokens.tensor(); }), "no error") << "another file is not affected";
}

TEST_F(MappedFiles, AShorterLastPageIsNoticedToo) {
  const std::string file = put_tokens("t.bin");
  const Tokens tokens = TokenBin{{file}, {}, 0}.load().train;
  fs::resize_file(file, 41'000);
  EXPECT_THAT(error_of([&] { tokens.tensor(); }), HasSubstr("from 41024 to 41000 bytes"));
}

TEST_F(MappedFiles, SingleTokensOfLostPagesAreErrors) {
  const std::string file = put_tokens("t.bin");
  const Tokens tokens = TokenBin{{file}, {}, 0}.load().train;
  fs::resize_file(file, 0);
  EXPECT_THAT(error_of([&] { tokens[kTokens - 1]; }), HasSubstr("from 41024 to 0 bytes"));
  fs::remove(file);
  EXPECT_THAT(error_of([&] { tokens[0]; }), HasSubstr(file + " of 41024 bytes cannot be read"));
}

TEST_F(MappedFiles, AFileThatIsReplacedOrLongerIsRead) {
  const std::string file = put_tokens("t.bin");
  const Tokens tokens = TokenBin{{file}, {}, 0}.load().train;
  fs::resize_file(file, 50'000);
  fs::rename(put("new", "short"), file);
  EXPECT_EQ(tokens.tensor().sum().item<int64_t>(), 0x101 * kTokens);
}

TEST_F(MappedFiles, ArraysAndImagesThatWereShortenedAreErrors) {
  const std::string values(20'000 * 4, '\0');
  const std::string inputs = put("x.npy", npy("<f4", "10000, 2", values));
  const std::string targets = put("y.npy", npy("<i4", "10000,", values.substr(0, 40'000)));
  const NpyDataset arrays({inputs, targets});
  fs::resize_file(targets, 1000);
  EXPECT_THAT(error_of([&] { arrays.get({9'999}); }),
              AllOf(HasSubstr("NpyDataset: " + targets), HasSubstr("was shortened")));

  const std::string header{"\0\0\x08\x03\0\0\x40\0\0\0\0\x01\0\0\0\x01", 16};
  const std::string images = put("images", header + std::string(0x4000, '\0'));
  const std::string labels =
      put("labels", std::string("\0\0\x08\x01\0\0\x40\0", 8) + std::string(0x4000, '\0'));
  const IdxDataset pictures({images, labels, 0});
  fs::resize_file(images, 100);
  EXPECT_THAT(error_of([&] { pictures.get({0x3fff}); }),
              AllOf(HasSubstr("IdxDataset: " + images), HasSubstr("from 16400 to 100 bytes")));
}

TEST_F(MappedFiles, TheLoaderNamesTheIteration) {
  const std::string file = put_tokens("t.bin");
  const auto data =
      std::make_shared<TokenDataset>(TokenBin{{file}, {}, 0}.load().train, 100, false);
  BatchLoader loader(data, [](int64_t) { return std::vector<int64_t>{100}; }, 7, 9,
                     {.threads = 1, .depth = 0});
  loader.next();
  fs::resize_file(file, 5000);
  EXPECT_THAT(error_of([&] { loader.next(); }),
              AllOf(HasSubstr("BatchLoader: iteration 8: "), HasSubstr("was shortened")));
}

/// Reads a page that a file, mapped here and not by the library, does not have.
int read_beyond(const std::string& file) {
  const int fd = ::open(file.c_str(), O_RDONLY);
  const auto* page =
      static_cast<const volatile char*>(::mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0));
  return page[8000];
}

class MappedFilesDeath : public MappedFiles {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

TEST_F(MappedFilesDeath, AnotherSigbusEndsTheProcessAsBefore) {
  const std::string file = put_tokens("t.bin"), small = put("small", "x");
  const TokenBin source{{file}, {}, 0};
  const auto fault = [&] {
    const TokenData data = source.load();
    read_beyond(small);
  };
  const auto sent = [&] {
    const TokenData data = source.load();
    ::raise(SIGBUS);
  };
  EXPECT_EXIT(fault(), ::testing::KilledBySignal(SIGBUS), "");
  EXPECT_EXIT(sent(), ::testing::KilledBySignal(SIGBUS), "");
}

TEST_F(MappedFilesDeath, AnotherSigbusGoesToTheFormerHandler) {
  const std::string file = put_tokens("t.bin"), small = put("small", "x");
  const TokenBin source{{file}, {}, 0};
  const auto fault = [&] {
    ::signal(SIGBUS, [](int) { ::_exit(7); });
    const TokenData data = source.load();
    read_beyond(small);
  };
  EXPECT_EXIT(fault(), ::testing::ExitedWithCode(7), "");
}

}  // namespace
}  // namespace tessera
