#include <functional>
#include <map>
#include <set>

#include "zero/plan.h"
#include "zero/zero_harness.h"

// plan_zero(): which options go together. It needs no ranks.

namespace {

using namespace tessera;
using namespace tessera::testing;
using ::testing::HasSubstr;

using zero::plan_zero;
using zero::Setting;

const Setting kHosts{.ranks = 4, .messages_between_hosts = true};

/// A choice of a user, each of which does something else than the default.
struct Choice {
  std::string name;
  std::function<void(ZeroOptions&, Setting&)> make;
};

const std::vector<Choice> kChoices{
    {"overlap none", [](auto& o, auto&) { o.overlap = Overlap::none; }},
    {"overlap background", [](auto& o, auto&) { o.overlap = Overlap::background; }},
    {"shard_gradients", [](auto& o, auto&) { o.shard_gradients = true; }},
    {"share_parameters", [](auto& o, auto&) { o.share_parameters = true; }},
    {"own storage", [](auto& o, auto&) { o.parameters_as_bucket_view = false; }},
    {"reduced elsewhere", [](auto& o, auto&) { o.reduce_gradients = false; }},
    {"DDP", [](auto&, auto& s) { s.ddp_reduces = true; }},
    {"wire.gradients", [](auto& o, auto&) { o.wire.gradients = WireFormat::int8; }},
    {"wire.parameters", [](auto& o, auto&) { o.wire.parameters = WireFormat::bfloat16; }},
    {"LBFGS", [](auto&, auto& s) { s.uses_all_parameters = true; }},
    {"device", [](auto&, auto& s) { s.on_cpu = false; }},
    {"partition", [](auto& o, auto&) { o.partition = Partition::whole; }},
    {"one host", [](auto&, auto& s) { s.messages_between_hosts = false; }},
    {"one rank", [](auto&, auto& s) { s.ranks = 1, s.messages_between_hosts = false; }},
    {"no broadcast", [](auto& o, auto&) { o.broadcast_parameters = false; }},
    {"buffers", [](auto& o, auto&) { o.buffers = BufferSync::none; }},
};

/// The pairs that are refused. A page of the documentation has a row for each.
const std::map<std::set<std::string>, std::string> kRefused{
    {{"shard_gradients", "DDP"}, "option shard_gradients excludes DistributedDataParallel"},
    {{"shard_gradients", "reduced elsewhere"}, "option shard_gradients needs reduce_gradients"},
    {{"shard_gradients", "LBFGS"}, "option shard_gradients needs an optimizer that does not"},
    {{"share_parameters", "own storage"}, "share_parameters needs parameters_as_bucket_view"},
    {{"share_parameters", "LBFGS"}, "option share_parameters needs an optimizer that does not"},
    {{"share_parameters", "device"}, "option share_parameters needs parameters on the CPU"},
    {{"wire.gradients", "DDP"}, "wire.gradients is int8, and the gradients are reduced elsewhere"},
    {{"wire.gradients", "reduced elsewhere"}, "the gradients are reduced elsewhere"},
    {{"wire.parameters", "own storage"}, "wire.parameters is bfloat16, and it needs"},
};

TEST(ZeroPlan, EveryPairOfOptionsWorksOrIsRefusedWithTheWordsOfTheTable) {
  for (const auto& first : kChoices) {
    for (const auto& second : kChoices) {
      if (first.name == second.name) continue;
      SCOPED_TRACE(first.name + " and " + second.name);
      ZeroOptions options;
      Setting setting = kHosts;
      first.make(options, setting);
      second.make(options, setting);
      const auto text = thrown_by([&] { plan_zero(options, setting, "prefix"); });
      const auto row = kRefused.find({first.name, second.name});
      if (row == kRefused.end()) EXPECT_EQ(text, "no error");
      else
        EXPECT_THAT(text, ::testing::AllOf(HasSubstr("prefix: option "), HasSubstr(row->second)));
    }
  }
}

TEST(ZeroPlan, OverlapsWhereItPaysAndIsPossible) {
  const auto plan = [](Overlap overlap, Setting setting, ZeroOptions options = {}) {
    options.overlap = overlap;
    const auto result = plan_zero(options, setting, "");
    return std::pair(result.early, result.in_background);
  };
  using Both = std::pair<bool, bool>;
  const Setting one_host{.ranks = 4}, alone{}, on_device{4, true, false, false, false};
  EXPECT_EQ(plan(Overlap::none, kHosts), Both(false, false));
  EXPECT_EQ(plan(Overlap::backward, kHosts), Both(true, false));
  EXPECT_EQ(plan(Overlap::background, kHosts), Both(true, true));
  EXPECT_EQ(plan(Overlap::backward, one_host), Both(false, false));  // one pass is faster
  EXPECT_EQ(plan(Overlap::background, one_host), Both(true, true));
  EXPECT_EQ(plan(Overlap::background, alone), Both(false, false));
  EXPECT_EQ(plan(Overlap::background, on_device), Both(false, false));
  EXPECT_EQ(plan(Overlap::background, kHosts, {.shard_gradients = true}), Both(false, true));
  EXPECT_EQ(plan(Overlap::background, kHosts, {.share_parameters = true}), Both(true, false));
  EXPECT_EQ(plan(Overlap::background, kHosts, {.parameters_as_bucket_view = false}),
            Both(true, false));
  EXPECT_EQ(plan(Overlap::backward, kHosts, {.reduce_gradients = false}), Both(false, false));
  // A gradient that a second backward changes is not a wrong sum.
  const Setting checked{.ranks = 4, .messages_between_hosts = true, .checks_results = true};
  EXPECT_EQ(plan(Overlap::background, checked), Both(false, true));
}

TEST(ZeroPlan, LessOverlapThanAskedForIsSaid) {
  const auto notes = [](const ZeroOptions& options, const Setting& setting) {
    return plan_zero(options, setting, "").notes;
  };
  EXPECT_TRUE(notes({.overlap = Overlap::background}, kHosts).empty());
  EXPECT_TRUE(notes({.share_parameters = true}, kHosts).empty());
  EXPECT_THAT(notes({.overlap = Overlap::background, .share_parameters = true}, kHosts),
              ::testing::ElementsAre(HasSubstr("before it returns: share_parameters")));
}

}  // namespace
