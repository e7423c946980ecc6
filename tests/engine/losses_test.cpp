#include "tessera/step/losses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/thrown_by.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using testing::thrown_by;

TEST(ParseLosses, TheValueOfATensorIsItsMeanAndOfAListTheSumOfMeans) {
  const auto parsed =
      parse_losses({{"loss_cls", at::tensor({1.0, 2.0, 6.0})},
                    {"aux", std::vector<at::Tensor>{at::tensor({1.0, 3.0}), at::tensor({5.0})}}});
  ASSERT_EQ(parsed.values.size(), 3u);
  EXPECT_EQ(parsed.values[1].first, "loss_cls");
  EXPECT_EQ(parsed.values[1].second.dim(), 0);
  EXPECT_EQ(parsed.values[1].second.item<double>(), 3);
  EXPECT_EQ(parsed.values[2].first, "aux");
  EXPECT_EQ(parsed.values[2].second.item<double>(), 7);
}

TEST(ParseLosses, TheTotalIsTheFirstValueAndIsNamedLoss) {
  const auto parsed = parse_losses({{"loss_a", at::tensor({1.0})}, {"loss_b", at::tensor({2.0})}});
  ASSERT_EQ(parsed.values.size(), 3u);
  EXPECT_EQ(parsed.values[0].first, "loss");
  EXPECT_EQ(parsed.values[0].second.item<double>(), 3);
  const auto own = parse_losses(
      {{"acc", at::tensor({9.0})}, {"loss", at::tensor({1.0})}, {"loss_b", at::tensor({2.0})}});
  ASSERT_EQ(own.values.size(), 3u);
  EXPECT_EQ(own.values[0].first, "loss");
  EXPECT_EQ(own.values[0].second.item<double>(), 3) << "the total, not the model's own entry";
  EXPECT_EQ(own.values[1].first, "acc");
  EXPECT_EQ(own.values[2].first, "loss_b");
}

TEST(ParseLosses, TotalIsTheSumOfTheEntriesNamedLoss) {
  const auto parsed = parse_losses(
      {{"loss_a", at::tensor({1.0})},
       {"accuracy", at::tensor({100.0})},
       {"my_losses", std::vector<at::Tensor>{at::tensor({10.0}), at::tensor({20.0})}}});
  EXPECT_EQ(parsed.total.item<double>(), 31);
}

TEST(ParseLosses, TotalHasAGraphAndValuesAreDetached) {
  const auto weight = at::tensor({2.0, 4.0}).requires_grad_();
  const auto parsed = parse_losses({{"loss", weight * 3}, {"norm", weight}});
  parsed.total.backward();
  EXPECT_TRUE(at::equal(weight.grad(), at::tensor({1.5, 1.5})));
  for (const auto& [name, value] : parsed.values) EXPECT_FALSE(value.requires_grad()) << name;
}

TEST(ParseLosses, RefusesEntriesThatHaveNoMean) {
  const auto with = [](const std::variant<at::Tensor, std::vector<at::Tensor>>& entry) {
    return thrown_by([&] { parse_losses({{"loss", at::ones({1})}, {"extra", entry}}); });
  };
  EXPECT_THAT(with(at::Tensor()), HasSubstr("\"extra\" is an undefined tensor"));
  EXPECT_THAT(with(std::vector<at::Tensor>{}), HasSubstr("\"extra\" is an empty list"));
  EXPECT_THAT(with(std::vector<at::Tensor>{at::ones({1}), at::Tensor()}),
              HasSubstr("\"extra\" is an undefined tensor"));
  EXPECT_THAT(with(at::ones({0, 3})), HasSubstr("\"extra\" has no elements"));
  EXPECT_THAT(with(at::ones({2}, at::kLong)),
              HasSubstr("\"extra\" is of Long; expected a floating-point tensor"));
}

TEST(ParseLosses, WithoutALossTheErrorNamesTheEntries) {
  EXPECT_EQ(thrown_by([] {
              parse_losses({{"acc", at::ones({1})}, {"Loss", at::ones({1})}});
            }),
            "parse_losses: nothing to minimise in \"acc\", \"Loss\"; expected a name that contains "
            "\"loss\"");
  EXPECT_THAT(thrown_by([] { parse_losses({}); }), HasSubstr("an empty map"));
  EXPECT_THAT(thrown_by([] {
                parse_losses({{"loss", at::ones({1})}, {"loss", at::ones({1})}});
              }),
              HasSubstr("\"loss\" is given twice"));
}

}  // namespace
}  // namespace tessera
