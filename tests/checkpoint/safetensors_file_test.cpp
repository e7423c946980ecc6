// Reading and writing files, and the state of the folder after a failure.

#include <csignal>
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/detail/torch_compat.h"
#include "tessera/detail/write_file.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class SafetensorsFiles : public testing::Test {
 protected:
  SafetensorsFiles() {
    std::string name = (fs::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = name;
  }
  ~SafetensorsFiles() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  std::string put(const std::string& name, const std::string& header,
                  const std::string& data) const {
    std::ofstream file(path(name), std::ios::binary);
    for (size_t i = 0; i < 8; ++i) file.put(static_cast<char>(header.size() >> (8 * i) & 0xff));
    file << header << data;
    return path(name);
  }

  size_t files() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

template <typename Function>
std::string message_of(Function function) {
  try {
    function();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing thrown";
}

TEST_F(SafetensorsFiles, EveryDtypeComesBackBitForBit) {
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const at::ScalarType type :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
        at::kChar, at::kByte, at::kBool, at::kComplexFloat}) {
    tensors.emplace_back(std::string("t.") + c10::toString(type),
                         (at::arange(-6, 6).view({3, 4}) * 1.25).to(type));
  }
  tensors.emplace_back("scalar", at::scalar_tensor(3.5));
  tensors.emplace_back("empty", at::empty({0, 5}));
  tensors.emplace_back("strided", at::arange(12, at::kFloat).view({3, 4}).t());
  save_safetensors(path("a"), tensors, {{"format", "pt"}});
  EXPECT_EQ(files(), 1u);

  const SafetensorsFile file(path("a"));
  EXPECT_EQ(file.names().size(), tensors.size());
  EXPECT_EQ(file.metadata().at("format"), "pt");
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor loaded = file.load(name);
    EXPECT_EQ(loaded.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(loaded.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(loaded, tensor)) << name;
    EXPECT_EQ(file.info(name).begin % static_cast<uint64_t>(tensor.element_size()), 0u)
        << name << " is not aligned";
  }
}

TEST_F(SafetensorsFiles, ConjugateAndNegativeViewsAreWrittenWithTheirValues) {
  const auto real = at::arange(1, 7, at::kFloat), complex = at::complex(real, real + 1);
  const std::vector<std::pair<std::string, at::Tensor>> tensors{
      {"negative", at::_neg_view(real)},
      {"conjugate", complex.conj()},
      {"imaginary", at::imag(complex.conj())}};
  save_safetensors(path("a"), tensors);
  const SafetensorsFile file(path("a"));
  for (const auto& [name, tensor] : tensors)
    EXPECT_TRUE(at::equal(file.load(name), tensor.resolve_conj().resolve_neg())) << name;
}

TEST_F(SafetensorsFiles, ComplexNumbersOfTwoDoublesArePairsInTheFile) {
  const auto real = at::arange(6, at::kDouble).view({2, 3}), complex = at::complex(real, real + 1);
  const auto scalar = at::complex(real[1][1], real[1][2]);
  const SafetensorsMetadata metadata{{"by", "someone"}};
  save_safetensors(path("a"), {{"c", complex}, {"f", real}, {"s", scalar}}, metadata);
  const SafetensorsFile file(path("a"));
  EXPECT_TRUE(at::equal(file.load("c"), complex));
  EXPECT_TRUE(at::equal(file.load("f"), real));
  EXPECT_TRUE(at::equal(file.load("s"), scalar));
  EXPECT_EQ(file.scalar_type("c"), at::kComplexDouble);
  EXPECT_EQ(file.metadata(), metadata);
  auto slice = at::empty({2}, at::kComplexDouble);
  file.load_slice("c", 1, 2, slice);
  EXPECT_TRUE(at::equal(slice, complex.view({-1}).narrow(0, 1, 2)));
  std::ifstream in(path("a"), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  EXPECT_THAT(bytes, HasSubstr(R"("complex128":"[\"c\",\"s\"]")"));
  EXPECT_THAT(bytes, HasSubstr(R"("c":{"dtype":"F64","shape":[2,3,2])"));
  EXPECT_THAT(message_of([&] {
                save_safetensors(path("b"), {{"f", real}}, {{"complex128", "[]"}});
              }),
              HasSubstr("\"complex128\" is reserved"));
}

TEST_F(SafetensorsFiles, TheLayoutIsThatOfTheFormat) {
  save_safetensors(path("a"),
                   {{"x", at::tensor({1.0f, -2.0f})}, {"b", at::tensor({7}, at::kLong)}});
  std::ifstream in(path("a"), std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const std::string header = R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},)"
                             R"("x":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})";
  const size_t padded = (header.size() + 7) / 8 * 8;
  ASSERT_EQ(bytes.size(), 8 + padded + 16);
  EXPECT_EQ(bytes.substr(0, 8), std::string(1, static_cast<char>(padded)) + std::string(7, '\0'));
  EXPECT_EQ(bytes.substr(8, padded), header + std::string(padded - header.size(), ' '));
  EXPECT_EQ(bytes.substr(8 + padded), std::string("\x07\0\0\0\0\0\0\0\0\0\x80\x3f\0\0\0\xc0", 16));
}

TEST_F(SafetensorsFiles, SlicesReadOnlyTheirElements) {
  const at::Tensor whole = at::arange(24, at::kFloat).view({4, 6});
  save_safetensors(path("a"), {{"pad", at::zeros({3}, at::kDouble)}, {"x", whole}});
  const SafetensorsFile file(path("a"));
  const at::Tensor out = at::empty({5});
  file.load_slice("x", 7, 5, out);
  EXPECT_TRUE(at::equal(out, whole.flatten().slice(0, 7, 12)));
  file.load_slice("x", 24, 0, at::empty({0}));
  EXPECT_THROW(file.load_slice("x", 20, 5, out), UsageError);
  EXPECT_THROW(file.load_slice("x", -1, 5, out), UsageError);
  EXPECT_THROW(file.load_slice("x", 0, 4, out), UsageError);
  EXPECT_THROW(file.load_slice("x", 0, 5, at::empty({5}, at::kDouble)), UsageError);
  EXPECT_THROW(file.load_slice("x", 0, 5, at::empty({10}).slice(0, 0, 10, 2)), UsageError);
}

TEST_F(SafetensorsFiles, AnUnknownNameIsAnErrorWithTheMostSimilarName) {
  save_safetensors(path("a"), {{"transformer.wte.weight", at::zeros({1})}});
  const SafetensorsFile file(path("a"));
  EXPECT_FALSE(file.contains("x"));
  EXPECT_THAT(message_of([&] { file.load("transformer.wte.weigth"); }),
              HasSubstr("did you mean \"transformer.wte.weight\""));
}

TEST_F(SafetensorsFiles, DtypesUnknownToLibtorchAreListedButNotLoaded) {
  put("a",
      R"({"f":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]},)"
      R"("ok":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
      "abc");
  const SafetensorsFile file(path("a"));
  EXPECT_EQ(file.info("f").dtype, "F8_E8M0");
  EXPECT_THAT(message_of([&] { file.load("f"); }), HasSubstr("F8_E8M0"));
  EXPECT_EQ(file.load("ok").item<int>(), 'c');
}

TEST_F(SafetensorsFiles, BadFilesAreRefusedByName) {
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("none")); }),
              HasSubstr("none: cannot be opened: No such file"));
  EXPECT_THAT(message_of([&] { SafetensorsFile(folder_.string()); }),
              HasSubstr("not a regular file"));
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("pipe")); }), HasSubstr("not a regular file"));
  std::ofstream(path("short")) << "1234567";
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("short")); }), HasSubstr("7 bytes"));
  put("trailing", R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "ab");
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("trailing")); }),
              HasSubstr("1 trailing bytes"));
  put("cut", R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", "ab");
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("cut")); }),
              HasSubstr("beyond the 2 data bytes"));
  std::ofstream(path("huge"), std::ios::binary) << std::string(7, '\xff') << '\x7f' << "{}";
  EXPECT_THAT(message_of([&] { SafetensorsFile(path("huge")); }), HasSubstr("limit"));
}

TEST_F(SafetensorsFiles, AFileCutWhileOpenIsAnErrorNotACrash) {
  save_safetensors(path("a"), {{"x", at::zeros({1000})}});
  const SafetensorsFile file(path("a"));
  fs::resize_file(path("a"), 1000);
  EXPECT_THAT(message_of([&] { file.load("x"); }), HasSubstr("cut short"));
}

TEST_F(SafetensorsFiles, WriterTakesAnyOrderAndChecksEach) {
  SafetensorsWriter writer(path("a"), {{"x", at::kFloat, {2}}, {"y", at::kLong, {}}}, {{"k", "v"}});
  writer.write("y", at::scalar_tensor(4, at::kLong));
  EXPECT_THROW(writer.write("y", at::scalar_tensor(4, at::kLong)), UsageError);
  EXPECT_THROW(writer.write("z", at::zeros({2})), UsageError);
  EXPECT_THROW(writer.write("x", at::zeros({3})), UsageError);
  EXPECT_THROW(writer.write("x", at::zeros({2}, at::kDouble)), UsageError);
  EXPECT_THAT(message_of([&] { writer.commit(); }), HasSubstr("1 tensors were not written: \"x\""));
  EXPECT_FALSE(fs::exists(path("a")));
  writer.write("x", at::ones({2}));
  writer.commit();
  EXPECT_EQ(files(), 1u);
  EXPECT_THROW(writer.commit(), UsageError);
  EXPECT_EQ(SafetensorsFile(path("a")).load("y").item<int64_t>(), 4);
}

TEST_F(SafetensorsFiles, WriterRefusesBadDeclarations) {
  const auto declare = [&](std::vector<SafetensorsSpec> specs, SafetensorsMetadata metadata = {}) {
    return message_of([&] { SafetensorsWriter(path("a"), std::move(specs), std::move(metadata)); });
  };
  EXPECT_THAT(declare({{"x", at::kFloat, {}}, {"x", at::kFloat, {}}}), HasSubstr("twice"));
  EXPECT_THAT(declare({{"__metadata__", at::kFloat, {}}}), HasSubstr("reserved"));
  EXPECT_THAT(declare({{"x", at::kFloat, {-1}}}), HasSubstr("negative"));
  EXPECT_THAT(declare({{"x", at::kFloat, {int64_t{1} << 40, int64_t{1} << 40}}}),
              HasSubstr("overflow"));
  EXPECT_THAT(declare({{"x", at::kComplexHalf, {}}}), HasSubstr("cannot hold"));
  EXPECT_THAT(declare({{"w\xff", at::kFloat, {}}}),
              HasSubstr(R"(tensor name "w\xff" is not valid UTF-8)"));
  EXPECT_THAT(message_of([&] {
                SafetensorsWriter::check("f", {{"w\xff", at::kFloat, {}}});
              }),
              HasSubstr("not valid UTF-8"));
  EXPECT_NO_THROW(SafetensorsWriter::check("f", {{std::string("a\0b", 3), at::kFloat, {}}}));
  EXPECT_THAT(declare({}, {{"k", "\xff"}}), HasSubstr("UTF-8"));
  EXPECT_EQ(files(), 0u);
}

TEST_F(SafetensorsFiles, WithoutCommitTheOldFileStays) {
  save_safetensors(path("a"), {{"x", at::ones({2})}});
  {
    SafetensorsWriter writer(path("a"), {{"x", at::kFloat, {2}}});
    writer.write("x", at::zeros({2}));
    EXPECT_EQ(files(), 2u);
  }
  EXPECT_EQ(files(), 1u);
  EXPECT_TRUE(at::equal(SafetensorsFile(path("a")).load("x"), at::ones({2})));
}

TEST_F(SafetensorsFiles, APathThatCannotBeWrittenIsNamed) {
  const auto save = [&](const std::string& target) {
    return message_of([&] { save_safetensors(target, {{"x", at::ones({2})}}); });
  };
  EXPECT_THAT(save(path("none/a")), HasSubstr("the folder " + path("none") + " does not exist"));
  EXPECT_THAT(save(folder_.string()), HasSubstr("not a regular file"));
  EXPECT_THAT(save("/dev/null"), HasSubstr("not a regular file"));
  EXPECT_THAT(save(""), HasSubstr("empty"));
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(SafetensorsFiles, ASymbolicLinkIsFollowedAndStays) {
  save_safetensors(path("a"), {{"x", at::ones({2})}});
  fs::create_symlink("a", path("link"));
  save_safetensors(path("link"), {{"x", at::zeros({2})}});
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_TRUE(at::equal(SafetensorsFile(path("a")).load("x"), at::zeros({2})));
}

// Stands for a full disk, which a test cannot make without privileges: the limit on file size also
// fails in the middle of a file.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit before_{};
  void (*handler_)(int);
};

TEST_F(SafetensorsFiles, AFullDiskLeavesTheOldFileAndNothingElse) {
  save_safetensors(path("a"), {{"x", at::ones({2})}});
  std::string message;
  {
    const FileSizeLimit limit(64 * 1024);
    SafetensorsWriter writer(path("a"), {{"x", at::kFloat, {1 << 20}}});
    message = message_of([&] { writer.write("x", at::zeros({1 << 20})); });
    EXPECT_EQ(files(), 1u) << "the temporary is still there";
    EXPECT_THROW(writer.commit(), UsageError);
  }
  EXPECT_THAT(message, HasSubstr(path("a")));
  EXPECT_THAT(message, HasSubstr("File too large"));
  EXPECT_TRUE(at::equal(SafetensorsFile(path("a")).load("x"), at::ones({2})));
}

TEST_F(SafetensorsFiles, ATrialChangesNothingAndFailsAsAWriteWould) {
  save_safetensors(path("a"), {{"x", at::ones({2})}});
  const auto time = fs::last_write_time(path("a"));
  check_writable(path("a"));
  check_writable(path("b"));
  {
    const FileSizeLimit limit(1024);
    EXPECT_THAT(message_of([&] { check_writable(path("a")); }),
                HasSubstr(path("a") + ": writing 4096 bytes at offset 0 failed: File too large"));
  }
  EXPECT_THAT(message_of([&] { check_writable("/proc/a"); }), HasSubstr("create a file in /proc"));
  EXPECT_EQ(files(), 1u);
  EXPECT_EQ(fs::last_write_time(path("a")), time);
  EXPECT_TRUE(at::equal(SafetensorsFile(path("a")).load("x"), at::ones({2})));
}

TEST_F(SafetensorsFiles, ANameWithANulComesBack) {
  const std::string name("a\0b", 3);
  save_safetensors(path("a"), {{name, at::ones({2})}});
  EXPECT_EQ(SafetensorsFile(path("a")).names(), std::vector<std::string>{name});
}

TEST_F(SafetensorsFiles, ArchivesOfOtherFormatsAreCalledByTheirName) {
  const auto refused = [&](const std::string& begin) {
    std::ofstream(path("model.pt"), std::ios::binary) << begin + std::string(100, 'x');
    return message_of([&] { SafetensorsFile(path("model.pt")); });
  };
  EXPECT_THAT(refused("PK\x03\x04"), HasSubstr("model.pt: is a zip archive, as torch::save()"));
  EXPECT_THAT(refused("\x80\x02\x8a\x0a"), HasSubstr("model.pt: is a Python pickle"));
  EXPECT_THAT(refused("\x80\x12\x8a\x0a"), HasSubstr("is this a safetensors file?"));
  // A header of 0x280 bytes begins like a pickle.
  const std::string header = R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})";
  const SafetensorsFile sound(put("sound", header + std::string(0x280 - header.size(), ' '), "x"));
  EXPECT_EQ(sound.entries().size(), 1U);
}

}  // namespace
}  // namespace tessera
