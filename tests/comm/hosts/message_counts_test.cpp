// How the messages of small collectives grow with the number of ranks. The ranks are threads of one
// process, so their hosts are numbers.
#include <bit>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "tessera/step/agreement.h"

namespace {

using tessera::AgreedError;
using tessera::ProcessGroup;
using tessera::ProcessGroupOptions;
using tessera::comm::Transport;
using tessera::testing::run_ranks;
using ::testing::HasSubstr;

/// The messages that this rank sends in `body`.
template <class Body>
uint64_t messages_of(const ProcessGroup& group, const Body& body) {
  const auto before = group.impl()->transport->sent().messages;
  body();
  return group.impl()->transport->sent().messages - before;
}

uint64_t log2_of(size_t n) { return std::bit_width(n - 1); }

/// A collective with headers, and one with headers and some data, of `rounds` messages each.
void check_counts(ProcessGroup group, int rank, uint64_t rounds) {
  EXPECT_EQ(messages_of(group, [&] { group.barrier(); }), rounds);
  EXPECT_EQ(messages_of(group, [&] { group.check_contract("Test", {"same"}); }), rounds);
  EXPECT_EQ(messages_of(group, [&] { tessera::agree(group, [] {}); }), rounds);
  EXPECT_EQ(messages_of(group, [&] { group.split(-1); }), rounds);
  std::optional<ProcessGroup> half;
  EXPECT_EQ(messages_of(group, [&] { half = group.split(rank % 2); }), rounds);
  // One message less where a block is empty.
  const auto gather_texts = [&] {
    const auto texts = group.all_gather_bytes(std::to_string(rank));
    for (int r = 0; r < group.size(); ++r) EXPECT_EQ(texts[r], std::to_string(r));
  };
  EXPECT_LE(messages_of(group, gather_texts), 2 * rounds);
  const auto agree_on_error = [&] {
    try {
      tessera::agree(group, [&] {
        if (rank == 1) throw std::runtime_error("no such file");
      });
      ADD_FAILURE() << "no error";
    } catch (const AgreedError& error) {
      EXPECT_THAT(error.what(), HasSubstr("rank 1: no such file"));
    }
  };
  EXPECT_LE(messages_of(group, agree_on_error), 2 * rounds);
  auto sum = at::full({256}, rank, at::kFloat);
  EXPECT_LE(messages_of(group, [&] { group.all_reduce(sum); }), 2 * rounds);
  EXPECT_EQ(sum[255].item<int>(), group.size() * (group.size() - 1) / 2);
  for (int root = 0; root < group.size(); root += 2) {
    auto value = at::full({256}, rank, at::kFloat);
    EXPECT_LE(messages_of(group, [&] { group.broadcast(value, root); }), 2 * rounds);
    EXPECT_EQ(value[255].item<int>(), root);
  }
  group.barrier();  // until then no rank leaves its half
}

TEST(MessageCountsTest, OverMessagesEachRankSendsTheLogarithmOfTheRanks) {
  ProcessGroupOptions options;
  options.backend = tessera::Backend::TCP;
  for (const int world : {2, 3, 4, 5, 8, 13}) {
    SCOPED_TRACE(world);
    run_ranks(
        world,
        [&](ProcessGroup group, int rank) { check_counts(group, rank, log2_of(group.size())); },
        options);
  }
}

TEST(MessageCountsTest, OnSeveralHostsOneRankOfEachSendsTheLogarithmOfTheHosts) {
  for (const size_t number : {3, 4, 6}) {
    SCOPED_TRACE(number);
    std::vector<int> hosts;
    for (size_t i = 0; i < 2 * number; ++i) hosts.push_back(static_cast<int>(i / 2));
    tessera::testing::run_ranks_on(hosts, [&](ProcessGroup group, int rank) {
      const bool leads = rank % 2 == 0;
      check_counts(group, rank, leads ? log2_of(number) : 0);
    });
  }
}

TEST(MessageCountsTest, OnOneHostNothingIsSent) {
  run_ranks(4, [](ProcessGroup group, int rank) { check_counts(group, rank, 0); });
}

}  // namespace
