#include <cmath>
#include <fstream>

#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/optim/adam.h>

#include "harness/batches.h"
#include "harness/models.h"
#include "harness/temporary_folder.h"
#include "harness/thrown_by.h"
#include "tessera/module_state_dict.h"
#include "tessera/optim.h"
#include "tessera/optim/optimizer_state_file.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

OptimizerStateDict stepped_adam() {
  auto net = testing::seeded<testing::Uneven>(1);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.1).betas({0.3, 1.0 / 3}));
  for (int step = 0; step < 2; ++step) {
    adam.zero_grad();
    testing::loss_of(net(testing::rows(step))).backward();
    adam.step();
  }
  return state_dict(adam, named_parameters(*net));
}

void expect_same(const OptimizerStateDict& a, const OptimizerStateDict& b) {
  ASSERT_EQ(a.groups.size(), b.groups.size());
  for (size_t g = 0; g < a.groups.size(); ++g) {
    EXPECT_EQ(a.groups[g].parameters, b.groups[g].parameters);
    EXPECT_EQ(a.groups[g].options, b.groups[g].options);
  }
  ASSERT_EQ(a.state.size(), b.state.size());
  for (const auto& [parameter, state] : a.state) {
    const auto& other = b.state.at(parameter);
    EXPECT_EQ(state.scalars, other.scalars) << parameter;
    ASSERT_EQ(state.tensors.size(), other.tensors.size()) << parameter;
    for (const auto& [key, tensor] : state.tensors)
      EXPECT_TRUE(at::equal(tensor, other.tensors.at(key))) << parameter << "/" << key;
  }
}

TEST(OptimizerStateFile, ReturnsEveryBit) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() + "/adam.safetensors";
  auto dict = stepped_adam();
  dict.groups[0].options["name"] = std::string("f64:text");
  dict.groups[0].options["bounds"] = std::vector<double>{-INFINITY, 1.0 / 3};
  dict.groups[0].options["names"] = std::vector<std::string>{};
  dict.groups[0].options["on"] = true;
  dict.state["a/b"].scalars["ratio"] = 0.1;
  save_optimizer_state(dict, path);
  expect_same(load_optimizer_state(path), dict);
}

TEST(OptimizerStateFile, LoadsIntoAPlainOptimizer) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() + "/adam.safetensors";
  const auto dict = stepped_adam();
  save_optimizer_state(dict, path);
  auto net = testing::seeded<testing::Uneven>(2);
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.5));
  load_state_dict(adam, named_parameters(*net), load_optimizer_state(path));
  expect_same(state_dict(adam, named_parameters(*net)), dict);
}

TEST(OptimizerStateDict, OptionsOfOneGroupThatAreRefusedChangeNone) {
  auto net = testing::seeded<testing::Uneven>(2);
  const auto named = named_parameters(*net);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& [name, parameter] : named) groups.emplace_back(std::vector{parameter});
  torch::optim::Adam adam(groups, torch::optim::AdamOptions(0.5));
  auto dict = state_dict(adam, named);
  for (auto& group : dict.groups) group.options["lr"] = 0.25;
  dict.groups.back().options["ratio"] = 0.1;
  EXPECT_THAT(thrown_by([&] { load_state_dict(adam, named, dict); }), HasSubstr("ratio"));
  for (const auto& group : adam.param_groups()) EXPECT_EQ(group.options().get_lr(), 0.5);
  dict.groups.back().options.erase("ratio");
  load_state_dict(adam, named, dict);
  for (const auto& group : adam.param_groups()) EXPECT_EQ(group.options().get_lr(), 0.25);
}

TEST(OptimizerStateFile, BadFilesAreErrorsThatNameTheFile) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() + "/x.safetensors";
  save_safetensors(path, {{"w", at::ones({2})}});
  EXPECT_THAT(thrown_by([&] { load_optimizer_state(path); }), HasSubstr("has no optimizer state"));
  for (const char* text :
       {"{", "[]", R"({"version": 2})", R"({"version": 1})",
        R"({"version": 1, "groups": [], "state": {"w": {"tensors": ["m"], "scalars": {}}}})",
        R"({"version": 1, "groups": [], "state": {"w": {"tensors": [], "scalars": {"a": "x"}}}})",
        R"({"version": 1, "groups": [{"parameters": [], "options": {"a": null}}], "state": {}})"}) {
    save_safetensors(path, {}, {{"tessera_optimizer_state", text}});
    EXPECT_THAT(thrown_by([&] { load_optimizer_state(path); }),
                HasSubstr("load_optimizer_state: " + path))
        << text;
  }
  EXPECT_THAT(thrown_by([&] {
                OptimizerStateDict dict;
                dict.state["\xff"].scalars["a"] = int64_t{1};
                save_optimizer_state(dict, path);
              }),
              HasSubstr("not valid UTF-8"));
}

TEST(ModuleStateDict, GoesIntoAPlainModuleOfAnotherDtype) {
  auto net = testing::seeded<testing::Uneven>(1);
  torch::nn::Sequential norm(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  norm->forward(testing::rows(1));
  auto other = testing::seeded<testing::Uneven>(2);
  other->to(torch::kDouble);
  load_state_dict(*other, state_dict(*net));
  for (const auto& entry : net->named_parameters())
    EXPECT_TRUE(at::equal(other->named_parameters()[entry.key()], entry.value().to(at::kDouble)));
  torch::nn::Sequential copy(torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(2));
  load_state_dict(*copy, state_dict(*norm));
  for (const auto& entry : norm->named_buffers())
    EXPECT_TRUE(at::equal(copy->named_buffers()[entry.key()], entry.value())) << entry.key();
}

TEST(ModuleStateDict, AFileGoesIntoAPlainModule) {
  const testing::TemporaryFolder folder;
  const auto path = folder.path() + "/net.safetensors";
  auto net = testing::seeded<testing::Uneven>(1), other = testing::seeded<testing::Uneven>(2);
  save_safetensors(path, state_dict(*net));
  load_state_dict(*other, path);
  for (const auto& entry : net->named_parameters())
    EXPECT_TRUE(at::equal(other->named_parameters()[entry.key()], entry.value()));
}

struct TiedImpl : torch::nn::Module {
  explicit TiedImpl(double value) {
    in = register_module("in", torch::nn::Linear(3, 3));
    out = register_module("out", torch::nn::Linear(3, 3));
    out->weight = out->register_parameter("tied", in->weight);
    const at::Tensor scale = in->register_buffer("scale", at::ones({2}));
    out->register_buffer("scale", scale);
    const torch::NoGradGuard no_grad;
    for (auto& parameter : parameters()) parameter.fill_(value);
    scale.fill_(value);
  }
  torch::nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(Tied);

/// Weights of such a module as Python writes them.
ModuleStateDict python_weights(const std::vector<std::string>& names_of_weight,
                               const std::vector<std::string>& names_of_buffer) {
  ModuleStateDict state{{"in.bias", at::full({3}, 2.0)},
                        {"out.bias", at::full({3}, 2.0)},
                        {"out.weight", at::full({3, 3}, 2.0)}};
  for (const auto& name : names_of_weight) state.emplace_back(name, at::full({3, 3}, 2.0));
  for (const auto& name : names_of_buffer) state.emplace_back(name, at::full({2}, 2.0));
  return state;
}

TEST(ModuleStateDict, ATiedWeightIsReadUnderAnyOfItsNames) {
  using Names = std::vector<std::string>;
  const testing::TemporaryFolder folder;
  for (const auto& names :
       {Names{"in.weight"}, Names{"out.tied"}, Names{"in.weight", "out.tied"}}) {
    for (const auto& buffers :
         {Names{"in.scale"}, Names{"out.scale"}, Names{"in.scale", "out.scale"}}) {
      SCOPED_TRACE(::testing::PrintToString(names) + ::testing::PrintToString(buffers));
      const auto state = python_weights(names, buffers);
      const auto check = [&](const std::function<void(torch::nn::Module&)>& load) {
        Tied net(1);
        load(*net);
        for (const auto& item : net->named_parameters())
          EXPECT_TRUE(item.value().eq(2).all().item<bool>()) << item.key();
        for (const auto& item : net->named_buffers())
          EXPECT_TRUE(item.value().eq(2).all().item<bool>()) << item.key();
      };
      save_safetensors(folder.path("w.safetensors"), state);
      check([&](auto& net) { load_state_dict(net, state); });
      check([&](auto& net) { load_state_dict(net, folder.path("w.safetensors")); });
    }
  }
  auto differs = python_weights({"in.weight", "out.tied"}, {"in.scale"});
  differs[4].second = at::ones({3, 3});
  Tied net(1);
  EXPECT_THAT(thrown_by([&] { load_state_dict(*net, differs); }),
              HasSubstr("\"out.tied\" differs from \"in.weight\"; expected equal values"));
  EXPECT_TRUE(net->in->bias.eq(1).all().item<bool>());
  EXPECT_THAT(thrown_by([&] { load_state_dict(*net, python_weights({}, {"in.scale"})); }),
              HasSubstr("missing in.weight"));
}

TEST(ModuleStateDict, ErrorsNameTheTensorsAndChangeNothing) {
  auto net = testing::seeded<testing::Uneven>(1);
  const auto before = testing::copies(net->parameters());
  const auto with = [&](const std::function<void(ModuleStateDict&)>& change) {
    auto state = state_dict(*testing::seeded<testing::Uneven>(2));
    change(state);
    return thrown_by([&] { load_state_dict(*net, state); });
  };
  EXPECT_THAT(with([](auto& state) { state.erase(state.begin()); }), HasSubstr("missing scale"));
  EXPECT_THAT(with([](auto& state) { state.emplace_back("new", at::ones({1})); }),
              HasSubstr("not in the model: new"));
  EXPECT_THAT(with([](auto& state) { state.push_back(state[0]); }),
              HasSubstr("scale is given twice"));
  EXPECT_THAT(with([](auto& state) { state[0].second = at::ones({2}); }),
              HasSubstr("scale has shape [2]; expected [1]"));
  EXPECT_THAT(with([](auto& state) { state[0].second = at::ones({1}, at::kComplexFloat); }),
              HasSubstr("scale is complex; expected Float, as in the model"));
  EXPECT_THAT(with([](auto& state) { state[0].second = at::Tensor(); }),
              HasSubstr("scale is undefined"));
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_TRUE(at::equal(net->parameters()[i], before[i]));
}

}  // namespace
}  // namespace tessera
