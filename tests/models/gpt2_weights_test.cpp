// Hugging Face's names and shapes, and reading and writing model.safetensors.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/temporary_folder.h"
#include "tessera/error.h"
#include "tessera/models/gpt2.h"
#include "tessera/safetensors.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using TensorList = std::vector<std::pair<std::string, at::Tensor>>;

GPT2Options tiny(uint64_t seed = 0) {
  GPT2Options options;
  options.vocab_size = 11;
  options.n_positions = 5;
  options.n_embd = 8;
  options.n_layer = 2;
  options.n_head = 2;
  options.seed = seed;
  return options;
}

class GPT2Weights : public testing::FolderTest {
 protected:
  std::string path() const { return folder_.path("model.safetensors"); }

  static TensorList tensors(GPT2& model) {
    TensorList list;
    for (auto& item : model->named_parameters())
      list.emplace_back(item.key(), item.value().detach().clone());
    return list;
  }

  std::string refusal(GPT2& model, const TensorList& list) const {
    save_safetensors(path(), list);
    const TensorList before = tensors(model);
    try {
      model->load_weights(path());
    } catch (const UsageError& error) {
      for (const auto& [name, value] : before)
        EXPECT_TRUE(at::equal(model->named_parameters()[name], value)) << name << " has changed";
      return error.what();
    }
    return "accepted";
  }

  static void expect_equal(GPT2& a, GPT2& b) {
    for (auto& item : a->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), b->named_parameters()[item.key()])) << item.key();
  }
};

TEST_F(GPT2Weights, NamesAndShapesAreHuggingFaces) {
  GPT2 model(tiny());
  std::map<std::string, std::vector<int64_t>> expected = {{"transformer.wte.weight", {11, 8}},
                                                          {"transformer.wpe.weight", {5, 8}},
                                                          {"transformer.ln_f.weight", {8}},
                                                          {"transformer.ln_f.bias", {8}}};
  for (const std::string h : {"transformer.h.0.", "transformer.h.1."}) {
    expected.insert({{h + "ln_1.weight", {8}},
                     {h + "ln_1.bias", {8}},
                     {h + "attn.c_attn.weight", {8, 24}},
                     {h + "attn.c_attn.bias", {24}},
                     {h + "attn.c_proj.weight", {8, 8}},
                     {h + "attn.c_proj.bias", {8}},
                     {h + "ln_2.weight", {8}},
                     {h + "ln_2.bias", {8}},
                     {h + "mlp.c_fc.weight", {8, 32}},
                     {h + "mlp.c_fc.bias", {32}},
                     {h + "mlp.c_proj.weight", {32, 8}},
                     {h + "mlp.c_proj.bias", {8}}});
  }
  std::map<std::string, std::vector<int64_t>> found;
  for (const auto& item : model->named_parameters()) found[item.key()] = item.value().sizes().vec();
  EXPECT_EQ(found, expected);
  EXPECT_EQ(model->named_buffers().size(), 0u);

  model->forward(at::zeros({1, 5}, at::kLong));
  EXPECT_EQ(model->named_buffers().size(), 0u) << "the mask must not become state";
  GPT2Options untied = tiny();
  untied.tie_word_embeddings = false;
  EXPECT_EQ(GPT2(untied)->named_parameters()["lm_head.weight"].sizes(), at::IntArrayRef({11, 8}));
}

TEST_F(GPT2Weights, ParametersAreInTheOrderOfTheModules) {
  GPT2 model(tiny());
  const auto keys = model->named_parameters().keys();
  EXPECT_EQ(keys[0], "transformer.wte.weight");
  EXPECT_EQ(keys[2], "transformer.h.0.ln_1.weight");
  EXPECT_EQ(keys[4], "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(keys.back(), "transformer.ln_f.bias");
}

TEST_F(GPT2Weights, AreSavedAndLoadedBitByBit) {
  GPT2 from(tiny(1)), to(tiny(2));
  from->save_weights(path());
  EXPECT_EQ(SafetensorsFile(path()).metadata().at("format"), "pt");
  EXPECT_FALSE(SafetensorsFile(path()).contains("lm_head.weight"));
  to->load_weights(path());
  expect_equal(from, to);
  GPT2Options options = tiny(3);
  options.tie_word_embeddings = false;
  GPT2 untied(options), untied_to(options);
  {
    const torch::NoGradGuard no_grad;
    untied->named_parameters()["lm_head.weight"].add_(1);
  }
  untied->save_weights(path());
  untied_to->load_weights(path());
  expect_equal(untied, untied_to);
}

TEST_F(GPT2Weights, AreLoadedWithoutPrefixWithMasksAndInOtherDtypes) {
  GPT2 from(tiny(1)), to(tiny(2));
  TensorList list;
  for (auto& [name, value] : tensors(from))
    list.emplace_back(name.substr(std::string("transformer.").size()), value.to(at::kDouble));
  list.emplace_back("h.0.attn.bias", at::ones({1, 1, 5, 5}));
  list.emplace_back("h.1.attn.masked_bias", at::scalar_tensor(-1e4));
  EXPECT_EQ(refusal(to, list), "accepted");
  expect_equal(from, to);
  EXPECT_EQ(to->parameters()[0].scalar_type(), at::kFloat);
}

TEST_F(GPT2Weights, ATiedHeadMustEqualTheEmbedding) {
  GPT2 from(tiny(1)), to(tiny(2));
  TensorList list = tensors(from);
  list.emplace_back("lm_head.weight", list[0].second.clone());
  EXPECT_EQ(refusal(to, list), "accepted");
  expect_equal(from, to);
  list.back().second.add_(1);
  EXPECT_THAT(refusal(to, list),
              HasSubstr("\"lm_head.weight\" differs from \"transformer.wte.weight\""));
  list.back().second.sub_(1);
  list.erase(list.begin());
  GPT2 third(tiny(2));
  EXPECT_EQ(refusal(third, list), "accepted") << "the head may stand for the embedding";
}

TEST_F(GPT2Weights, AllFaultsAreInOneMessage) {
  GPT2 model(tiny());
  TensorList list = tensors(model);
  list[0].second = at::zeros({12, 8});
  list[3].first = "transformer.h.0.ln_1.bais";
  const std::string message = refusal(model, list);
  EXPECT_THAT(message, HasSubstr(path()));
  EXPECT_THAT(message, HasSubstr("\"transformer.wte.weight\" is [12, 8], the model has [11, 8]"));
  EXPECT_THAT(message, HasSubstr("1 missing: \"transformer.h.0.ln_1.bias\""));
  EXPECT_THAT(
      message,
      HasSubstr("\"transformer.h.0.ln_1.bais\"; did you mean \"transformer.h.0.ln_1.bias\""));
  list = tensors(model);
  list.emplace_back("wte.weight", list[0].second);
  EXPECT_THAT(refusal(model, list), HasSubstr("given twice"));
}

}  // namespace
}  // namespace tessera
