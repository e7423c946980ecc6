#include "tessera/weights/torch_file.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <caffe2/serialize/inline_container.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/serialization/pickler.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/script.h>
#include <torch/serialize.h>

#include "harness/temporary_folder.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

class TorchFileTest : public testing::FolderTest {};

TEST_F(TorchFileTest, EveryDtypeComesBackBitByBit) {
  std::vector<at::ScalarType> types{at::kFloat, at::kDouble, at::kHalf,         at::kBFloat16,
                                    at::kLong,  at::kInt,    at::kShort,        at::kChar,
                                    at::kByte,  at::kBool,   at::kComplexFloat, at::kComplexDouble};
#if TESSERA_TORCH_HAS_SMALL_TYPES
  types.insert(types.end(), {at::kUInt16, at::kUInt32, at::kUInt64, at::kFloat8_e4m3fn,
                             at::kFloat8_e5m2, at::kComplexHalf});
#endif
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto type : types)
    tensors.emplace_back(c10::toString(type), at::arange(6, at::kFloat).view({2, 3}).to(type));
  tensors.emplace_back("empty", at::empty({0, 3}));
  tensors.emplace_back("scalar", at::scalar_tensor(-0.0));
  tensors.emplace_back("strided", at::arange(6, at::kFloat).view({2, 3}).t());
  save_torch_file(path("all.pt"), tensors);
  const TorchFile file(path("all.pt"));
  ASSERT_EQ(file.entries().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const auto loaded = file.load(name);
    EXPECT_EQ(loaded.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(loaded.sizes(), tensor.sizes()) << name;
    const auto expected = tensor.contiguous();
    if (expected.nbytes() > 0)
      EXPECT_EQ(0, std::memcmp(loaded.data_ptr(), expected.data_ptr(), expected.nbytes())) << name;
  }
}

TEST_F(TorchFileTest, SlicesAreThoseOfTheWholeTensor) {
  const auto whole = at::arange(35, at::kFloat).view({5, 7});
  save_torch_file(path("a.pt"), {{"a", whole}});
  const TorchFile file(path("a.pt"));
  for (int64_t begin = 0; begin <= 35; begin += 5) {
    const auto part = at::empty({35 - begin});
    file.load_slice("a", begin, 35 - begin, part);
    EXPECT_TRUE(at::equal(part, whole.view({-1}).slice(0, begin)));
  }
  EXPECT_THAT(refusal([&] { file.load_slice("a", 30, 6, at::empty({6})); }),
              HasSubstr("not within its 35"));
  EXPECT_THAT(refusal([&] { file.load("b"); }), HasSubstr("no tensor \"b\""));
}

/// Bytes that this process has read from files so far.
int64_t bytes_read() {
  std::ifstream io("/proc/self/io");
  std::string name;
  int64_t value = 0;
  while (io >> name >> value)
    if (name == "rchar:") return value;
  ADD_FAILURE() << "/proc/self/io has no rchar";
  return 0;
}

/// Writes the tensors as torch.save does: with their strides, each with its whole storage.
void save_views(const std::string& path, const std::map<std::string, at::Tensor>& tensors) {
  c10::Dict<std::string, at::Tensor> dict;
  for (const auto& [name, tensor] : tensors) dict.insert(name, tensor);
  std::string pickle;
  torch::jit::Pickler pickler([&](const char* data, size_t size) { pickle.append(data, size); },
                              nullptr, nullptr, nullptr, nullptr, /*tag_aggregates=*/false);
  pickler.protocol();
  pickler.pushIValue(dict);
  pickler.stop();
  caffe2::serialize::PyTorchStreamWriter writer(path);
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  for (size_t i = 0; i < pickler.tensorData().size(); ++i) {
    const auto storage = torch::jit::getWriteableTensorData(pickler.tensorData()[i]);
    writer.writeRecord("data/" + std::to_string(i), storage.data(), storage.sizeInBytes());
  }
  writer.writeEndOfFile();
}

TEST_F(TorchFileTest, ASliceOfAStridedTensorReadsItsRowsAlone) {
  const auto base = at::arange(600 * 500, at::kFloat);
  const std::map<std::string, at::Tensor> tensors{
      {"transposed", base.view({600, 500}).t()},
      {"gaps", base.view({100, 3000}).narrow(1, 700, 300)},
      {"permuted", base.view({20, 30, 500}).permute({1, 2, 0})},
      {"middle", base.view({20, 30, 500}).permute({1, 0, 2}).narrow(2, 100, 70)},
      {"expanded", base.narrow(0, 5, 100).view({1, 100}).expand({40, 100})},
      {"columns", base.view({600, 500}).narrow(1, 7, 3).t()}};
  save_views(path("strided.pt"), tensors);
  const TorchFile file(path("strided.pt"));
  for (const auto& [name, tensor] : tensors) {
    SCOPED_TRACE(name);
    const auto flat = tensor.contiguous().view({-1});
    EXPECT_TRUE(at::equal(file.load(name), tensor));
    const int64_t row = flat.numel() / tensor.size(0);
    for (const auto& [begin, end] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 1}, {row - 1, row + 1}, {row / 2, flat.numel() / 2}, {3, flat.numel()}}) {
      const auto part = at::empty({end - begin});
      const auto before = bytes_read();
      file.load_slice(name, begin, end - begin, part);
      const auto read = bytes_read() - before;
      EXPECT_TRUE(at::equal(part, flat.slice(0, begin, end))) << begin << " to " << end;
      const bool side_by_side = name == "gaps" || name == "middle" || name == "expanded";
      if (side_by_side) EXPECT_LE(read, 4 * (end - begin + 2 * row) + 4096);
    }
  }
  const auto half = at::empty({250 * 600});
  const auto before = bytes_read();
  file.load_slice("transposed", 0, 250 * 600, half);
  EXPECT_NEAR(static_cast<double>(bytes_read() - before), 4.0 * 250 * 600, 4096);
}

/// The archive at `from` with a text instead of each of its files of code.
void replace_code(const std::string& from, const std::string& to, const std::string& code) {
  caffe2::serialize::PyTorchStreamReader reader(from);
  caffe2::serialize::PyTorchStreamWriter writer(to);
  for (const auto& name : reader.getAllRecords()) {
    const auto [data, bytes] = reader.getRecord(name);
    if (name.starts_with(".data") || name == "version" || name == "byteorder") continue;
    if (name.starts_with("code/")) writer.writeRecord(name, code.data(), code.size());
    else writer.writeRecord(name, data.get(), bytes);
  }
  writer.writeEndOfFile();
}

TEST_F(TorchFileTest, AFileOfCppsTorchSaveIsReadWithoutItsCode) {
  torch::nn::Sequential net(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  net->forward(at::arange(12, at::kFloat).view({4, 3}));
  torch::save(net, path("saved.pt"));
  replace_code(path("saved.pt"), path("net.pt"), "what is no code");
  torch::nn::Sequential other(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  EXPECT_ANY_THROW(torch::load(other, path("net.pt"))) << "libtorch reads the code";
  for (const auto* name : {"saved.pt", "net.pt"}) {
    const TorchFile file(path(name));
    size_t count = 0;
    for (const auto& items : {net->named_parameters(), net->named_buffers()}) {
      for (const auto& item : items) {
        ++count;
        EXPECT_TRUE(at::equal(file.load(item.key()), item.value())) << name << ": " << item.key();
        EXPECT_EQ(file.scalar_type(item.key()), item.value().scalar_type());
      }
    }
    EXPECT_EQ(count, 7u);
    EXPECT_EQ(file.entries().size(), count);
  }
  torch::save(std::vector<at::Tensor>{at::ones({2}), at::zeros({3})}, path("list.pt"));
  EXPECT_TRUE(at::equal(TorchFile(path("list.pt")).load("1"), at::zeros({3})));
}

TEST_F(TorchFileTest, TorchScriptWithCodeIsRefusedByName) {
  torch::jit::Module module("__torch__.Net");
  module.register_parameter("weight", at::arange(4, at::kFloat), false);
  module.define("def forward(self, x):\n  return x + self.weight\n");
  module.save(path("script.pt"));
  torch::jit::Module("Net").save(path("bare.pt"));
  for (const auto* name : {"script.pt", "bare.pt"}) {
    const std::string file = path(name);
    for (const std::string key : {"", "model"})
      EXPECT_THAT(
          refusal([&] { TorchFile opened(file, key); }),
          AllOf(HasSubstr(file + ": is a TorchScript archive with the class \"__torch__.Net\""),
                HasSubstr("torch.save(torch.jit.load(FILE).state_dict(), \"weights.pt\")")));
  }
}

TEST_F(TorchFileTest, AWriterThatIsNotCommittedLeavesNothing) {
  {
    TorchFileWriter writer(path("a.pt"), {{"a", at::kFloat, {2}}, {"b", at::kFloat, {2}}});
    writer.write("a", at::ones({2}));
    EXPECT_THAT(refusal([&] { writer.write("a", at::ones({2})); }), HasSubstr("written twice"));
    EXPECT_THAT(refusal([&] { writer.write("b", at::ones({3})); }),
                HasSubstr("declared as Float [2], given is Float [3]"));
    EXPECT_THAT(refusal([&] { writer.commit(); }), HasSubstr("1 tensors were not written: \"b\""));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path()));
  EXPECT_THAT(refusal([&] {
                TorchFileWriter(path("a.pt"), {{"a", at::kFloat, {2}}, {"a", at::kFloat, {2}}});
              }),
              HasSubstr("given twice"));
}

TEST_F(TorchFileTest, AFileThatIsCutOffIsRefused) {
  save_torch_file(path("a.pt"), {{"a", at::ones({100})}});
  std::filesystem::resize_file(path("a.pt"), 600);
  EXPECT_THAT(refusal([&] { TorchFile file(path("a.pt")); }), HasSubstr("may be cut off"));
}

}  // namespace
}  // namespace tessera
