#include "launch/rendezvous_folder.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

class RendezvousFolderTest : public testing::Test {
 protected:
  RendezvousFolderTest() {
    char name[] = "/tmp/rendezvous-test-XXXXXX";
    base_ = mkdtemp(name);
    setenv("TMPDIR", base_.c_str(), 1);
    unsetenv("XDG_RUNTIME_DIR");
  }
  ~RendezvousFolderTest() override {
    fs::remove_all(base_);
    unsetenv("TMPDIR");
    unsetenv("XDG_RUNTIME_DIR");
  }

  /// Makes the folder of a process that has ended without removing it, as after kill -9.
  std::string left_behind() const {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      const std::string path = (new RendezvousFolder())->path();
      std::ofstream(path + "/store") << "x";
      (void)!write(ends[1], path.data(), path.size());
      _exit(0);
    }
    close(ends[1]);
    char buffer[4096];
    const ssize_t got = read(ends[0], buffer, sizeof buffer);
    close(ends[0]);
    waitpid(pid, nullptr, 0);
    return std::string(buffer, got > 0 ? got : 0);
  }

  std::string base_;
};

TEST_F(RendezvousFolderTest, IsPrivateAndRemovedWithItsContents) {
  auto folder = std::make_unique<RendezvousFolder>();
  const std::string path = folder->path();
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
  EXPECT_EQ(fs::path(path).parent_path(), base_);
  fs::create_directory(path + "/sub");
  std::ofstream(path + "/sub/file") << "x";
  folder.reset();
  EXPECT_FALSE(fs::exists(path));
}

TEST_F(RendezvousFolderTest, TheRuntimeFolderIsPreferredWhenUsable) {
  const std::string runtime = base_ + "/run";
  fs::create_directory(runtime);
  setenv("XDG_RUNTIME_DIR", runtime.c_str(), 1);
  EXPECT_EQ(rendezvous_base(), runtime);
  setenv("XDG_RUNTIME_DIR", (base_ + "/none").c_str(), 1);
  EXPECT_EQ(rendezvous_base(), base_);
}

TEST_F(RendezvousFolderTest, SweepRemovesOnlyFoldersOfDeadOwners) {
  const std::string stale = left_behind();
  const std::string open_to_others = left_behind();
  ASSERT_TRUE(fs::exists(stale + "/store"));
  chmod(open_to_others.c_str(), 0755);
  const RendezvousFolder alive;
  const std::string foreign = base_ + "/tessera-rdzv-notours";
  fs::create_directory(foreign);
  chmod(foreign.c_str(), 0700);
  fs::create_directory_symlink(base_, base_ + "/tessera-rdzv-1-2-3-link");

  sweep_stale_folders(base_);

  EXPECT_FALSE(fs::exists(stale));
  EXPECT_TRUE(fs::exists(open_to_others));
  EXPECT_TRUE(fs::exists(alive.path()));
  EXPECT_TRUE(fs::exists(foreign));
  EXPECT_TRUE(fs::is_symlink(base_ + "/tessera-rdzv-1-2-3-link"));
  sweep_stale_folders(base_ + "/none");
}

/// `folder` under another name in the same place, in which `replace` has become `with`.
std::string renamed(const std::string& folder, const std::string& replace,
                    const std::string& with) {
  std::string other = folder;
  other.replace(other.find(replace), replace.size(), with);
  fs::rename(folder, other);
  return other;
}

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id") >> std::ws, id);
  std::erase(id, '-');
  return id;
}

TEST_F(RendezvousFolderTest, SweepLeavesTheFoldersOfOtherHosts) {
  const std::string foreign = renamed(left_behind(), boot_id(), std::string(32, '0'));

  sweep_stale_folders(base_);

  EXPECT_TRUE(fs::exists(foreign));
}

TEST_F(RendezvousFolderTest, SweepLeavesAFolderWhoseOwnerHoldsItsLock) {
  // As if another host had the same boot id: a virtual machine that was copied while it ran.
  const std::string held = left_behind();
  const int fd = open(held.c_str(), O_RDONLY | O_DIRECTORY);
  ASSERT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);

  sweep_stale_folders(base_);
  EXPECT_TRUE(fs::exists(held));

  close(fd);
  sweep_stale_folders(base_);
  EXPECT_FALSE(fs::exists(held));
}

TEST_F(RendezvousFolderTest, TheOwnerHoldsTheLock) {
  const RendezvousFolder folder;
  const int fd = open(folder.path().c_str(), O_RDONLY | O_DIRECTORY);
  EXPECT_NE(flock(fd, LOCK_EX | LOCK_NB), 0);
  EXPECT_EQ(errno, EWOULDBLOCK);
  close(fd);
}

TEST_F(RendezvousFolderTest, AFreePortCanBeBound) {
  const int port = free_port();
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  close(fd);
}

}  // namespace
}  // namespace tessera::launch
