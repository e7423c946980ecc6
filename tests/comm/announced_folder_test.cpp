#include "comm/rendezvous/announced_folder.h"

#include <filesystem>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "child.h"
#include "tessera/error.h"

namespace {

using namespace std::chrono_literals;
using tessera::comm::announced_folder;
using tessera::testing::Child;

std::string key_of(const std::string& name) {
  return "test-" + name + "-" + std::to_string(::getpid());
}

/// The names that begin with `key` in the folder of announcements.
std::set<std::string> names_of(const std::string& key) {
  std::set<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator("/tmp/tessera-" + std::to_string(::getuid()))) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(key)) names.insert(name);
  }
  return names;
}

TEST(AnnouncedFolder, TheNextRunOfAnyKeyRemovesTheFilesOfEndedRuns) {
  const auto ended = key_of("ended"), live = key_of("live"), next = key_of("next");
  EXPECT_EQ(Child([&] { announced_folder(ended, 0, 1, 1s); }).wait(), 0);
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  Child running([&] {
    announced_folder(live, 0, 1, 1s);
    EXPECT_EQ(::write(ready[1], "x", 1), 1);
    ::pause();
  });
  char byte;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  announced_folder(next, 0, 1, 1s);
  EXPECT_EQ(names_of(ended).size(), 0u);
  EXPECT_EQ(names_of(live).size(), 3u);  // folder, lock, announcement
  EXPECT_EQ(names_of(next).size(), 3u);
  EXPECT_TRUE(std::filesystem::is_directory(announced_folder(live, 1, 2, 1s)));
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(AnnouncedFolder, TwoLiveRunsUnderOneKeyAreAnError) {
  const auto key = key_of("twice");
  announced_folder(key, 0, 1, 1s);
  const auto status =
      Child([&] {
        try {
          announced_folder(key, 0, 1, 100ms);
        } catch (const tessera::UsageError& error) {
          ::_exit(std::string(error.what()).find("another run on this host already uses " + key) !=
                          std::string::npos
                      ? 7
                      : 1);
        }
      }).wait();
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
