#include "comm/meeting.h"

#include "child.h"
#include "tessera/error.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <thread>
#include <vector>

namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using tessera::comm::LaunchEnvironment;
using tessera::comm::meet;

/// A fresh folder, gone at the end.
class Folder {
 public:
  Folder() { path_ = ::mkdtemp(path_.data()); }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = (std::filesystem::temp_directory_path() / "meeting.XXXXXX").string();
};

LaunchEnvironment in_folder(int rank, int size, const std::string& folder) {
  LaunchEnvironment environment;
  environment.rank = rank;
  environment.size = size;
  environment.rendezvous = folder;
  return environment;
}

std::string error_of(const LaunchEnvironment& environment, std::chrono::milliseconds timeout = 10s) {
  try {
    meet(environment, timeout);
    return "no error";
  } catch (const tessera::Error& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("not one of ours: ") + error.what();
  }
}

TEST(Meeting, AFileInPlaceOfTheFolderAndNoFolderAtAllSaySo) {
  EXPECT_THAT(error_of(in_folder(0, 2, "/dev/null")), HasSubstr("rank 0: the meeting folder /dev/null cannot be used: Not a directory"));
  EXPECT_THAT(error_of(in_folder(1, 2, "/nowhere/at/all")), HasSubstr("rank 1: the meeting folder /nowhere/at/all cannot be used: No such file or directory"));
}

TEST(Meeting, AFolderThatTakesNoMoreBytesIsNamed) {
  const Folder folder;
  const auto status = tessera::testing::Child([&] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit none{0, 0};  // as on a full file system, but another errno
    ::setrlimit(RLIMIT_FSIZE, &none);
    const auto text = error_of(in_folder(1, 2, folder.path()));
    const bool right = text.find("rank 1 of 2") != std::string::npos && text.find(folder.path() + "/store") != std::string::npos && text.find("File too large") != std::string::npos;
    if (!right) ::write(2, text.data(), text.size());
    ::_exit(right && !text.starts_with("not") ? 7 : 1);
  }).wait();
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

/// What each of these says, when all come at once.
std::vector<std::string> errors_of(const std::vector<LaunchEnvironment>& environments, std::chrono::milliseconds timeout = 10s) {
  std::vector<std::string> errors(environments.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < errors.size(); ++i) threads.emplace_back([&, i] { errors[i] = error_of(environments[i], timeout); });
  for (auto& thread : threads) thread.join();
  return errors;
}

TEST(Meeting, RanksThatWereToldOfWorldsOfOtherSizesSayBoth) {
  const Folder folder;
  const auto errors = errors_of({in_folder(0, 2, folder.path()), in_folder(1, 3, folder.path()), in_folder(2, 3, folder.path())});
  EXPECT_THAT(errors[0], HasSubstr("rank 0: WORLD_SIZE is 2 here and 3 on rank 1; expected the same"));
  EXPECT_THAT(errors[1], HasSubstr("rank 1: WORLD_SIZE is 3 here and 2 on rank 0; expected the same"));
  EXPECT_THAT(errors[2], HasSubstr("rank 2: WORLD_SIZE is 3 here and 2 on rank 0; expected the same"));
}

}  // namespace
