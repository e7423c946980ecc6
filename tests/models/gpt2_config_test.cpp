// GPT2Options, and reading and writing Hugging Face's config.json.

#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "harness/temporary_folder.h"
#include "tessera/error.h"
#include "tessera/models/gpt2.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

class GPT2Config : public testing::FolderTest {
 protected:
  std::string path() const { return folder_.path("config.json"); }

  GPT2Options read(const std::string& text) const {
    std::ofstream(path(), std::ios::binary) << text;
    return GPT2Options::from_config_json(path());
  }

  std::string refusal(const std::string& text) const {
    try {
      read(text);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(GPT2Config, ReadsTheConfigThatItWrites) {
  GPT2Options options;
  options.vocab_size = 256;
  options.n_positions = 128;
  options.n_embd = 192;
  options.n_layer = 4;
  options.n_head = 6;
  options.n_inner = 512;
  options.layer_norm_epsilon = 2e-5;
  options.initializer_range = 0.01;
  options.embd_pdrop = 0.1;
  options.attn_pdrop = 0.2;
  options.resid_pdrop = 0.3;
  options.tie_word_embeddings = false;
  options.activation = "gelu";
  const GPT2Options again = read(options.to_config_json());
  EXPECT_EQ(again.to_config_json(), options.to_config_json());
  EXPECT_EQ(again.n_inner, 512);
  EXPECT_EQ(again.resid_pdrop, 0.3);
  EXPECT_FALSE(again.tie_word_embeddings);
  const auto json = nlohmann::json::parse(GPT2Options().to_config_json());
  EXPECT_EQ(json["architectures"][0], "GPT2LMHeadModel");
  EXPECT_TRUE(json["n_inner"].is_null());
}

TEST_F(GPT2Config, ReadsThePublishedConfig) {
  // The keys of openai-community/gpt2 that the model uses, and some that it ignores.
  const GPT2Options options =
      read(R"({"activation_function":"gelu_new","architectures":["GPT2LMHeadModel"],
    "attn_pdrop":0.1,"bos_token_id":50256,"embd_pdrop":0.1,"eos_token_id":50256,
    "initializer_range":0.02,
    "layer_norm_epsilon":1e-05,"model_type":"gpt2","n_ctx":1024,"n_embd":768,"n_head":12,
    "n_layer":12,
    "n_positions":1024,"resid_pdrop":0.1,"summary_activation":null,
    "task_specific_params":{"a":{"b":50}},
    "vocab_size":50257,"n_inner":null})");
  EXPECT_EQ(options.n_embd, 768);
  EXPECT_EQ(options.n_inner, 0);
  EXPECT_EQ(options.attn_pdrop, 0.1);
  EXPECT_TRUE(options.tie_word_embeddings);
  EXPECT_EQ(read("{}").n_layer, 12);
  EXPECT_EQ(read("{}").embd_pdrop, 0.0);
  EXPECT_EQ(read(R"({"activation_function":"gelu_pytorch_tanh"})").activation, "gelu_new");
}

TEST_F(GPT2Config, RefusesFaultyValuesNamingFileAndKey) {
  EXPECT_THAT(refusal("{"), HasSubstr(path() + ": is not valid JSON"));
  EXPECT_THAT(refusal("[]"), HasSubstr("object is expected"));
  EXPECT_THAT(refusal(R"({"n_embd":"768"})"),
              HasSubstr(path() + ": n_embd: the string \"768\"; expected a whole number"));
  EXPECT_THAT(refusal(R"({"n_embd":76.8})"), HasSubstr("expected a whole number"));
  EXPECT_THAT(refusal(R"({"n_layer":18446744073709551615})"), HasSubstr("expected a whole number"));
  EXPECT_THAT(refusal(R"({"tie_word_embeddings":1})"), HasSubstr("true or false"));
  EXPECT_THAT(refusal(R"({"attn_pdrop":true})"), HasSubstr("a number"));
  EXPECT_THAT(refusal(R"({"n_head":7})"),
              HasSubstr("n_head is 7, which does not divide n_embd, 768"));
  EXPECT_THAT(refusal(R"({"n_head":7})"), HasSubstr(path()));
  EXPECT_THAT(refusal(R"({"model_type":"llama"})"),
              HasSubstr("model_type: the string \"llama\"; expected one of gpt2"));
  EXPECT_THAT(refusal(R"({"scale_attn_by_inverse_layer_idx":true})"),
              HasSubstr("scale_attn_by_inverse_layer_idx"));
  EXPECT_THAT(refusal(R"({"activation_function":"gelu_nw"})"),
              HasSubstr("did you mean \"gelu_new\""));
  EXPECT_THROW(GPT2Options::from_config_json(folder_.path("none")), UsageError);
}

TEST(GPT2OptionsTest, RefusesValuesOutOfRangeNamingThem) {
  const auto refusal = [](const std::function<void(GPT2Options&)>& change) -> std::string {
    GPT2Options options;
    change(options);
    try {
      GPT2 model(options);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(refusal([](GPT2Options& o) { o.vocab_size = 0; }),
              HasSubstr("GPT2: vocab_size: 0; expected a whole number >= 1"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.n_layer = -1; }), HasSubstr("n_layer: -1;"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.n_embd = int64_t{1} << 40; }), HasSubstr("n_embd"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.n_head = 5; }), HasSubstr("n_head is 5"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.attn_pdrop = 1.0; }), HasSubstr("attn_pdrop"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.layer_norm_epsilon = 0; }),
              HasSubstr("layer_norm_epsilon"));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.activation_checkpointing_every = 0; }),
              HasSubstr("activation_checkpointing_every: 0;"));
  EXPECT_THAT(
      refusal([](GPT2Options& o) {
        o.activation_checkpointing_blocks = {"transformer.h.*", "h.*"};
      }),
      HasSubstr("activation_checkpointing_blocks: \"h.*\" matches no block; expected names from "
                "transformer.h.0 to transformer.h."));
  EXPECT_THAT(refusal([](GPT2Options& o) { o.initializer_range = -1; }),
              HasSubstr("initializer_range"));
}

TEST(Gpt2Options, NameTheBlocksThatAreRecomputed) {
  GPT2Options options;
  options.n_layer = 5;
  using Blocks = std::vector<bool>;
  EXPECT_EQ(options.recomputed_blocks(), Blocks({0, 0, 0, 0, 0}));
  options.activation_checkpointing = true;
  EXPECT_EQ(options.recomputed_blocks(), Blocks({1, 1, 1, 1, 1}));
  options.activation_checkpointing_every = 2;
  EXPECT_EQ(options.recomputed_blocks(), Blocks({1, 0, 1, 0, 1}));
  options.activation_checkpointing_blocks = {"transformer.h.1", "no.block", "*.h.3",
                                             "transformer.h.4"};
  EXPECT_EQ(options.recomputed_blocks(), Blocks({0, 1, 0, 0, 1})) << "every second one of 1, 3, 4";
}

}  // namespace
}  // namespace tessera
