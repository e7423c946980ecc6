#include <filesystem>
#include <fstream>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm/store/secret.h"
#include "tessera/error.h"

namespace {

using tessera::comm::read_secret;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

/// The secret with these variables, or the error.
std::string secret_with(const std::map<std::string, std::string>& variables) {
  try {
    return read_secret(
        [&](const char* name) {
          const auto found = variables.find(name);
          return found == variables.end() ? nullptr : found->second.c_str();
        },
        2);
  } catch (const tessera::UsageError& error) {
    return error.what();
  }
}

class StoreSecret : public ::testing::Test {
 protected:
  StoreSecret() { folder_ = ::mkdtemp(folder_.data()); }
  ~StoreSecret() override { std::filesystem::remove_all(folder_); }

  std::string file(const std::string& content, mode_t mode) {
    const auto path = folder_ + "/secret";
    std::filesystem::remove(path);
    std::ofstream(path) << content;
    ::chmod(path.c_str(), mode);
    return path;
  }
  std::string in(const std::string& path) { return secret_with({{"TESSERA_SECRET_FILE", path}}); }

  std::string folder_ = (std::filesystem::temp_directory_path() / "secret.XXXXXX").string();
};

TEST_F(StoreSecret, IsTheVariableElseTheFile) {
  EXPECT_EQ(secret_with({}), "");
  EXPECT_EQ(in(file("read from the file\n", 0600)), "read from the file");
  EXPECT_EQ(in(file("read from the file\r\n\n", 0400)), "read from the file");
  const std::string own = "0123456789abcdef";
  EXPECT_EQ(secret_with({{"TESSERA_SECRET", own}, {"TESSERA_SECRET_FILE", "/nowhere"}}), own);
  EXPECT_THAT(
      secret_with({{"TESSERA_SECRET", ""}}),
      HasSubstr("rank 2: the secret of TESSERA_SECRET is empty; expected at least 16 bytes"));
}

TEST_F(StoreSecret, OneThatIsEasyToGuessIsRefusedWithWhatIsExpected) {
  for (const std::string weak :
       {"hidden", "hidden-3456789a", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "passspasspasspass"}) {
    for (const auto& [name, error] : std::map<std::string, std::string>{
             {"TESSERA_SECRET", secret_with({{"TESSERA_SECRET", weak}})},
             {"TESSERA_SECRET_FILE", in(file(weak + "\n", 0600))}})
      EXPECT_THAT(error, AllOf(HasSubstr("rank 2: the secret of " + name +
                                         " is easy to guess; expected at "
                                         "least 16 bytes, 8 of them different"),
                               HasSubstr("'openssl rand -hex 16'"), Not(HasSubstr(weak))));
  }
  EXPECT_EQ(in(file("hidden-3456789ab", 0600)), "hidden-3456789ab") << "16 bytes";
}

TEST_F(StoreSecret, AFileThatOthersMayReadIsRefusedWithItsMode) {
  for (const mode_t mode : {0644, 0640, 0604, 0660, 0700}) {
    const auto path = file("hidden", mode);
    EXPECT_THAT(in(path),
                AllOf(HasSubstr("rank 2: TESSERA_SECRET_FILE is '" + path + "': its mode is 0"),
                      HasSubstr("expected a regular file of this user with mode 0600 or 0400"),
                      Not(HasSubstr("hidden"))));
  }
  EXPECT_THAT(in(file("hidden", 0644)), HasSubstr("its mode is 0644"));
}

TEST_F(StoreSecret, OtherThingsThanAFileWithASecretAreRefused) {
  EXPECT_THAT(in("/nowhere/at/all"), HasSubstr("No such file or directory"));
  EXPECT_THAT(in(folder_), HasSubstr("it is not a regular file"));
  EXPECT_THAT(in(file("\n", 0600)), HasSubstr("it is empty"));
  EXPECT_THAT(in(file(std::string(5000, 'x'), 0600)), HasSubstr("it is too long"));
  const auto fifo = folder_ + "/fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THAT(in(fifo), HasSubstr("it is not a regular file")) << "and does not block";
  if (::geteuid() == 0) {
    const auto theirs = file("hidden", 0600);
    ASSERT_EQ(::chown(theirs.c_str(), 1, 1), 0);
    EXPECT_THAT(in(theirs), HasSubstr("its owner is user 1, and this process runs as user 0"));
  }
}

}  // namespace
