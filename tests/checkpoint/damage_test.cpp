// Every changed, missing or additional byte of a checkpoint is detected, and the error names it.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>

#include "checkpoint/store/manifest.h"
#include "checkpoint/store/run_folder.h"
#include "checkpoint/store_fixture.h"
#include "harness/temporary_folder.h"
#include "tessera/safetensors.h"

namespace tessera {
namespace {

using namespace tessera::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Damage : public StoreTest {
 protected:
  Damage() {
    CheckpointStore store(run_, ProcessGroup(), {.keep_last = 10});
    for (const int64_t step : {10, 20, 30}) {
      CheckpointWriter writer(store, step);
      writer.add_tensors("model.safetensors",
                         {{"a", at::arange(5, at::kFloat)},
                          {"b", at::arange(3, at::kLong)},
                          {"none", at::empty({0})}},
                         {{"format", "pt"}});
      writer.add_text("config.yaml", "steps: 30\n");
      writer.add_text("empty.txt", "");
      StateSlice slice{{"a", {5}, 0, 5}, {}};
      slice.state.tensors["exp_avg"] = at::ones({5});
      slice.state.scalars = {{"step", int64_t{30}}, {"beta", 0.9}};
      writer.add_slices({slice});
      path_ = writer.commit();
    }
  }

  /// The tensor whose data contains byte `at` of a file; "" if there is none.
  std::string tensor_at(const std::string& file, size_t at) const {
    if (fs::path(file).extension() != ".safetensors") return "";
    const SafetensorsFile opened(path_ + "/" + file);
    uint64_t data = 0;
    for (const auto& entry : opened.entries()) data = std::max(data, entry.end);
    const size_t begin = fs::file_size(path_ + "/" + file) - data;
    for (const auto& entry : opened.entries())
      if (at >= begin + entry.begin && at < begin + entry.end) return entry.name;
    return "";
  }

  void verify() const { Checkpoint(path_).verify(); }

  std::string path_;
};

const char* const kAdvice = "older checkpoints in ";

TEST_F(Damage, AnUndamagedCheckpointPasses) {
  const Checkpoint checkpoint(path_ + "/");
  checkpoint.verify();
  EXPECT_EQ(checkpoint.path(), path_);
  EXPECT_EQ(checkpoint.step(), 30);
  EXPECT_EQ(checkpoint.world_size(), 1);
  EXPECT_THAT(checkpoint.files(),
              ::testing::ElementsAre("config.yaml", "empty.txt", "model.safetensors",
                                     "optimizer-00000-of-00001.safetensors"));
  EXPECT_EQ(checkpoint.text("config.yaml"), "steps: 30\n");
  EXPECT_EQ(checkpoint.text("empty.txt"), "");
  EXPECT_TRUE(
      same_bits(checkpoint.load_tensor("model.safetensors", "a"), at::arange(5, at::kFloat)));
  EXPECT_EQ(checkpoint.tensors("model.safetensors").metadata().at("format"), "pt");
  auto part = at::empty({2}, at::kLong);
  checkpoint.load_slice("model.safetensors", "b", 1, 2, part);
  EXPECT_TRUE(same_bits(part, at::arange(1, 3, at::kLong)));
}

TEST_F(Damage, EveryFlippedBitIsFoundAndNamed) {
  int flips = 0;
  for (const auto& file : names_in(path_)) {
    const std::string good = contents_of(path_ + "/" + file);
    for (size_t at = 0; at < good.size(); ++at) {
      const std::string tensor = tensor_at(file, at);
      put_byte(path_ + "/" + file, at, static_cast<char>(good[at] ^ (1 << (at * 5 % 8))));
      const std::string message = usage_error([&] { verify(); });
      ASSERT_THAT(message, HasSubstr(path_ + "/" + file)) << "byte " << at;
      ASSERT_THAT(message, HasSubstr(kAdvice + run_ + ": step-00000020, step-00000010"));
      if (!tensor.empty()) {
        ASSERT_THAT(message, HasSubstr("tensor \"" + tensor + "\"")) << "byte " << at;
        std::smatch bytes;
        ASSERT_TRUE(std::regex_search(message, bytes, std::regex("bytes (\\d+) to (\\d+) of")));
        ASSERT_LE(std::stoul(bytes[1]), at) << message;
        ASSERT_GE(std::stoul(bytes[2]), at) << message;
      }
      put_byte(path_ + "/" + file, at, good[at]);
      ++flips;
    }
  }
  EXPECT_GT(flips, 1000);
  verify();
}

TEST_F(Damage, EveryTruncationAndEveryExtraByteIsFound) {
  for (const auto& file : names_in(path_)) {
    const std::string good = contents_of(path_ + "/" + file);
    for (size_t size = good.size(); size-- > 0;) {
      fs::resize_file(path_ + "/" + file, size);
      ASSERT_THAT(usage_error([&] { Checkpoint{path_}; }),
                  AllOf(HasSubstr(path_ + "/" + file), HasSubstr(kAdvice)))
          << size << " bytes";
    }
    for (const std::string& more : {std::string(1, '\0'), std::string("\n"), good}) {
      put_contents(path_ + "/" + file, good + more);
      if (!more.empty())
        ASSERT_THAT(usage_error([&] { Checkpoint{path_}; }), HasSubstr(path_ + "/" + file))
            << more.size() << " more";
    }
    fs::remove(path_ + "/" + file);
    ASSERT_THAT(usage_error([&] { Checkpoint{path_}; }),
                AllOf(HasSubstr(path_ + "/" + file), HasSubstr(kAdvice)));
    fs::create_directory(path_ + "/" + file);
    ASSERT_THAT(usage_error([&] { Checkpoint{path_}; }),
                AllOf(HasSubstr(path_ + "/" + file), HasSubstr("not a regular file")));
    fs::remove(path_ + "/" + file);
    put_contents(path_ + "/" + file, good);
  }
  verify();
}

TEST_F(Damage, LoadingComparesDigests) {
  const auto flip_last = [&](const std::string& file) {
    const std::string text = contents_of(path_ + "/" + file);
    put_byte(path_ + "/" + file, text.size() - 1, static_cast<char>(text.back() ^ 4));
  };
  const std::string last =
      tensor_at("model.safetensors", fs::file_size(path_ + "/model.safetensors") - 1);
  const std::string slices = "optimizer-00000-of-00001.safetensors";
  flip_last("config.yaml");
  flip_last(slices);
  flip_last("model.safetensors");
  const Checkpoint checkpoint(path_);
  EXPECT_THAT(usage_error([&] { checkpoint.text("config.yaml"); }), HasSubstr("config.yaml"));
  EXPECT_THAT(usage_error([&] {
                checkpoint.load_slices({{"a", {5}, 0, 5}});
              }),
              AllOf(HasSubstr(slices), HasSubstr("tensor \"a/exp_avg\"")));
  const auto whole = [&] { checkpoint.load_tensor("model.safetensors", last); };
  EXPECT_THAT(usage_error(whole),
              AllOf(HasSubstr("model.safetensors"), HasSubstr("tensor \"" + last + "\"")));
  auto out = at::empty({5});
  EXPECT_THAT(usage_error([&] { checkpoint.load_slice("model.safetensors", last, 0, 5, out); }),
              HasSubstr("tensor \"a\""));
}

TEST_F(Damage, VerificationByAGroupFindsDamage) {
  put_byte(path_ + "/config.yaml", 0, 'S');
  EXPECT_THAT(usage_error([&] { Checkpoint(path_).verify(ProcessGroup()); }),
              HasSubstr("config.yaml"));
}

TEST_F(Damage, AFileOfAnotherCheckpointIsRefused) {
  // Both files are valid and of the same size. Only the digests of the header or the tensors
  // differ.
  const std::string file = "optimizer-00000-of-00001.safetensors";
  StateSlice slice{{"a", {5}, 0, 5}, {}};
  slice.state.tensors["exp_avg"] = at::zeros({5});
  CheckpointStore store(run_, ProcessGroup(), {.keep_last = 10});
  CheckpointWriter writer(store, 40);
  writer.add_slices({slice});
  const std::string other = writer.commit();
  put_contents(path_ + "/" + file, contents_of(other + "/" + file));
  EXPECT_THAT(usage_error([&] { verify(); }),
              AllOf(HasSubstr(path_ + "/" + file), HasSubstr("a/exp_avg")));
  fs::rename(other, run_ + "/step-00000050");
  EXPECT_THAT(usage_error([&] { Checkpoint(run_ + "/step-00000050"); }),
              HasSubstr("manifest of step 40, in the folder of step 50"));
}

TEST_F(Damage, APathThatIsNotACheckpointIsAnError) {
  EXPECT_THAT(usage_error([&] { Checkpoint(run_ + "/step-00000005"); }),
              AllOf(HasSubstr("step-00000005"), HasSubstr("there is no older checkpoint")));
  EXPECT_THAT(usage_error([&] { Checkpoint(run_ + "/step-00000025"); }),
              HasSubstr(kAdvice + run_ + ": step-00000020, step-00000010"));
  EXPECT_THAT(usage_error([&] { Checkpoint("/dev/null"); }), HasSubstr("not a folder"));
  EXPECT_THAT(usage_error([&] { Checkpoint{base_}; }),
              AllOf(HasSubstr("manifest.json"), Not(HasSubstr("older"))));
  const Checkpoint checkpoint(path_);
  EXPECT_THAT(usage_error([&] { checkpoint.text("confg.yaml"); }),
              HasSubstr("did you mean \"config.yaml\""));
  EXPECT_THAT(usage_error([&] { checkpoint.text("model.safetensors"); }), HasSubstr("not a text"));
  EXPECT_THAT(usage_error([&] { checkpoint.tensors("config.yaml"); }),
              HasSubstr("not a safetensors file"));
  EXPECT_THAT(usage_error([&] { checkpoint.load_tensor("model.safetensors", "c"); }),
              HasSubstr("no tensor \"c\""));
}

TEST(Manifest, ANewerVersionIsNotCalledDamaged) {
  const std::string ours = store::manifest_to_text({7, 1, {}});
  EXPECT_EQ(store::newer_version(ours), 0);
  std::string newer = ours;
  newer.replace(newer.find("\"version\": 1"), 12, "\"version\": 2");
  EXPECT_EQ(store::newer_version(newer), 2);
  for (const char* text : {"", "{", "[]", "{\"format\": 3}", "{\"version\": 9}"})
    EXPECT_EQ(store::newer_version(text), 0) << text;
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/step-00000007";
  std::filesystem::create_directories(path);
  std::ofstream(path + "/manifest.json") << newer;
  try {
    Checkpoint{path};
    ADD_FAILURE() << "no error";
  } catch (const CheckpointVersionError& error) {
    EXPECT_THAT(error.what(), HasSubstr("manifest.json: its version is 2; this Tessera reads up to "
                                        "version 1: expected a newer Tessera"));
  }
}

TEST(Manifest, ContentsAreCheckedEvenIfTheDigestMatches) {
  // A forger or a newer version could write invalid contents with a valid digest.
  const auto refused = [](store::Manifest manifest) {
    return usage_error([&] { store::manifest_from_text(store::manifest_to_text(manifest)); });
  };
  store::FileRecord file;
  file.digest = std::string(32, '0');
  for (const std::string name : {"../x", "a/b", "", ".hidden", "manifest.json"}) {
    file.name = name;
    EXPECT_THAT(refused({1, 1, {file}}), HasSubstr("is not allowed")) << name;
  }
  file.name = "t";
  file.header_bytes = 9;
  EXPECT_THAT(refused({1, 1, {file}}), HasSubstr("header_bytes"));
  file.bytes = 9;
  file.slice_set = "optimizer";
  file.slices = {{{"w", {3}, 2, 2}, {}, {}, {}}};
  EXPECT_THAT(refused({1, 1, {file}}), HasSubstr("not within"));
}

}  // namespace
}  // namespace tessera
