// Thousands of damaged archives and pickles, the same on every run: each is either refused with
// UsageError, or its tensors can be read. Under the address sanitizer this replaces the fuzz target
// (tests/fuzz/pickle_fuzz.cpp) where clang is missing.

#include <fstream>
#include <random>
#include <sstream>

#include <gtest/gtest.h>

#include "checkpoint/pickle/pickle_reader.h"
#include "checkpoint/pickle/pickle_writer.h"
#include "checkpoint/pickle/torch_values.h"
#include "harness/temporary_folder.h"
#include "tessera/error.h"
#include "tessera/weights/torch_file.h"

namespace tessera::pickle {
namespace {

std::string mutated(std::string text, std::mt19937& random) {
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  for (size_t edits = 1 + below(4); edits > 0 && text.size() > 1; --edits) {
    const size_t at = below(text.size());
    switch (below(5)) {
      case 0:
        text[at] = static_cast<char>(below(256));
        break;
      case 1:
        text[at] = static_cast<char>(text[at] ^ 1 << below(8));
        break;
      case 2:
        text.erase(at, 1 + below(8));
        break;
      case 3:
        text.insert(at, text.substr(below(text.size()), 1 + below(32)));
        break;
      default:
        text.resize(at);
        break;
    }
  }
  return text;
}

std::string sample_pickle() {
  PickleWriter out;
  out.begin_dict();
  out.text("model");
  out.begin_ordered_dict();
  out.text("a");
  out.tensor(kDtypes[0], "0", {2, 3});
  out.text("b");
  out.tensor(kDtypes[14], "1", {4});
  out.end_dict();
  out.text("list");
  out.begin_list();
  out.integer(-5);
  out.integer(int64_t{1} << 40);
  out.real(0.5);
  out.boolean(true);
  out.none();
  out.end_list();
  out.end_dict();
  return out.finish();
}

TEST(PickleMutation, DamagedPicklesAreRefusedOrSound) {
  const std::string sound = sample_pickle();
  std::mt19937 random(7);
  int read = 0;
  for (int i = 0; i < 30000; ++i) {
    try {
      const Values values = read_pickle("x: ", i == 0 ? sound : mutated(sound, random));
      for (const auto& tensor : tensors_in("x: ", values, weights_at("x: ", values, ""))) {
        ASSERT_GE(tensor.offset, 0);
        ASSERT_TRUE(tensor.numel == 0 ||
                    static_cast<uint64_t>((tensor.offset + tensor.extent) * tensor.dtype.bytes) <=
                        tensor.storage_bytes);
      }
      ++read;
    } catch (const UsageError&) {
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_LT(read, 25000);
}

TEST(PickleMutation, DamagedArchivesAreRefusedOrRead) {
  testing::TemporaryFolder folder;
  const std::string path = folder.path("sound.pt");
  save_torch_file(path, {{"a", at::arange(6, at::kFloat).view({2, 3})}, {"b", at::ones({4})}});
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  const std::string sound = text.str();
  std::mt19937 random(7);
  int read = 0;
  for (int i = 0; i < 2000; ++i) {
    const std::string file = folder.put("damaged.pt", i == 0 ? sound : mutated(sound, random));
    try {
      const TorchFile opened(file);
      for (const auto& entry : opened.entries()) opened.load(entry.name);
      ++read;
    } catch (const UsageError&) {
    }
  }
  EXPECT_GT(read, 20);
  EXPECT_LT(read, 1900);
}

}  // namespace
}  // namespace tessera::pickle
