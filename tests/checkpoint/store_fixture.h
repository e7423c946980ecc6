#pragma once

#include <bit>
#include <filesystem>
#include <fstream>
#include <functional>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "checkpoint/store/run_folder.h"
#include "tessera/checkpoint_store.h"
#include "tessera/error.h"

namespace tessera::testing {

namespace fs = std::filesystem;

/// A temporary folder for each test.
class StoreTest : public ::testing::Test {
 protected:
  StoreTest() {
    std::string name = (fs::temp_directory_path() / "tessera-store-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    base_ = name;
    run_ = base_ + "/run";
  }
  ~StoreTest() override { fs::remove_all(base_); }

  std::string write(const CheckpointStore& store, int64_t step) {
    CheckpointWriter writer(store, step);
    writer.add_text("step.txt", std::to_string(step));
    return writer.commit();
  }

  std::vector<int64_t> steps() const { return store::committed_steps(run_); }

  std::string base_;  ///< An existing folder.
  std::string run_;   ///< Does not exist at first.
};

inline std::set<std::string> names_in(const std::string& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

inline std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void put_contents(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
}

/// Changes a byte in place. Truncating and rewriting makes some file systems wait for the disk.
inline void put_byte(const std::string& path, size_t at, char byte) {
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(byte);
}

/// The text of the UsageError that `body` throws. The test fails if it throws nothing or another
/// error.
inline std::string usage_error(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "not a UsageError: " << error.what();
    return "";
  }
  ADD_FAILURE() << "nothing thrown";
  return "";
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) return false;
  const auto x = a.contiguous(), y = b.contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const ScalarValue& a, const ScalarValue& b) {
  if (a.index() != b.index()) return false;
  if (const auto* value = std::get_if<double>(&a))
    return std::bit_cast<uint64_t>(*value) == std::bit_cast<uint64_t>(std::get<double>(b));
  return a == b;
}

}  // namespace tessera::testing
