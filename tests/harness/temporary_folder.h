#pragma once

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>

namespace tessera::testing {

/// A new, empty folder, which the destructor removes with all that is in it.
class TemporaryFolder {
 public:
  TemporaryFolder()
      : path_((std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string()) {
    if (::mkdtemp(path_.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  /// The path of `name` inside the folder.
  std::string path(const std::string& name) const { return path_ + "/" + name; }

  /// Writes `bytes` to the file `name`, making its folders, and returns its path.
  std::string put(const std::string& name, const std::string& bytes) const {
    const std::filesystem::path file = path(name);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << bytes;
    return file.string();
  }

 private:
  std::string path_;
};

/// A test with a folder of its own.
class FolderTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::string put(const std::string& name, const std::string& bytes) const {
    return folder_.put(name, bytes);
  }

  TemporaryFolder folder_;
};

}  // namespace tessera::testing
