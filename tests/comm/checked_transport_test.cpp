// ProcessGroupOptions::check_results over a transport that makes mistakes.

#include "comm/group/checked_transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "harness/ranks.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

using comm::Transport;
using Counts = std::vector<int64_t>;
using ::testing::HasSubstr;

/// Changes one element of what one collective of the group leaves in `flat` on this rank.
class WrongTransport : public Transport {
 public:
  WrongTransport(std::unique_ptr<Transport> inner, const std::string& wrong)
      : inner_(std::move(inner)), wrong_(wrong) {}

  const char* name() const override { return inner_->name(); }
  std::vector<comm::OpHeader> exchange(const comm::OpHeader& mine) override {
    return inner_->exchange(mine);
  }
  void all_reduce(at::Tensor flat, double scale) override {
    inner_->all_reduce(flat, scale);
    spoil("all_reduce", flat);
  }
  void reduce(at::Tensor flat, int root) override {
    inner_->reduce(flat, root);
    spoil("reduce", flat);
  }
  void broadcast(at::Tensor flat, int root) override {
    inner_->broadcast(flat, root);
    spoil("broadcast", flat);
  }
  void all_gather(at::Tensor flat, const Counts& counts) override {
    inner_->all_gather(flat, counts);
    if (flat.scalar_type() == at::kFloat) spoil("all_gather", flat);
  }
  void reduce_scatter(at::Tensor flat, const Counts& counts, const Target& target) override {
    const ConsumeRun spoiled = [&](int64_t offset, const at::Tensor& run) {
      auto copy = run.clone();
      spoil("reduce_scatter_each", copy);
      (*target.consume)(offset, copy);
    };
    if (target.consume) return inner_->reduce_scatter(flat, counts, {target.scale, &spoiled});
    inner_->reduce_scatter(flat, counts, target);
    if (target.output.defined()) spoil("reduce_scatter_into", target.output);
    else spoil("reduce_scatter", flat);
  }
  void all_to_all(at::Tensor output, at::Tensor input, const Counts& recv_counts,
                  const Counts& send_counts) override {
    inner_->all_to_all(output, input, recv_counts, send_counts);
    spoil("all_to_all", output);
  }
  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  void abort() noexcept override { inner_->abort(); }

 private:
  /// Once. The check itself sends data with all_to_all, for each of the five sums before the
  /// group's own one.
  void spoil(const std::string& operation, at::Tensor flat) {
    if (operation != wrong_ || (operation == "all_to_all" && ++seen_ < 6)) return;
    wrong_.clear();
    flat.fill_(flat[0].item<float>() + 1);
  }

  std::unique_ptr<Transport> inner_;
  std::string wrong_;
  int seen_ = 0;
};

/// What the ranks throw when the given collective has a wrong result on rank 1 of 3.
std::vector<std::string> errors_of(const std::string& wrong, Backend backend = Backend::Auto) {
  ProcessGroupOptions options;
  options.backend = backend;
  const auto thrown = testing::run_ranks_catching(
      3,
      [&](ProcessGroup made, int rank) {
        auto impl = made.impl();
        auto world = impl->world;
        world.options.check_results = true;
        auto transport =
            std::make_unique<WrongTransport>(std::move(impl->transport), rank == 1 ? wrong : "");
        ProcessGroup group(
            std::make_shared<ProcessGroup::Impl>(std::move(world), std::move(transport)));
        auto flat = at::arange(9, at::kFloat) + rank;
        const Counts counts{4, 2, 3};
        auto output = at::empty({2}, at::kFloat);
        if (rank != 1) output = at::empty({counts[rank]}, at::kFloat);
        group.all_reduce(flat, 0.5, "first purpose");
        group.reduce(flat, 0);
        group.broadcast(flat, 2);
        group.all_gather(flat, counts);
        group.reduce_scatter_each(flat, counts, [](int64_t, const at::Tensor&) {});
        group.reduce_scatter_into_async(flat, counts, output).wait();
        group.reduce_scatter(flat, counts);
        auto received = at::empty({3}, at::kFloat);
        group.all_to_all(received, at::arange(3, at::kFloat), {1, 1, 1}, {1, 1, 1});
        // Not numbers are equal to themselves, and empty tensors are right.
        auto nan = at::full({5}, std::nan(""));
        group.all_reduce(nan);
        group.all_reduce(at::empty({0}));
      },
      options);
  std::vector<std::string> messages;
  for (const auto& error : thrown) {
    messages.push_back(testing::message_of(error));
    if (!error) continue;
    EXPECT_THROW(std::rethrow_exception(error), AgreedError) << messages.back();
  }
  return messages;
}

TEST(CheckedTransport, FindsNothingInRightResults) {
  for (const auto backend : {Backend::Auto, Backend::Gloo, Backend::TCP})
    for (const auto& error : errors_of("", backend)) EXPECT_EQ(error, "");
}

TEST(CheckedTransport, NamesTheCollectiveAndTheRankOnAllRanks) {
  const char* const sum = "is not the sum of the ranks' inputs; the collective is ";
  const std::pair<const char*, std::string> cases[] = {
      {"all_reduce", sum + std::string("all_reduce #1 of 9 Float; its purpose: scale 0.5, first")},
      {"reduce",
       "has changed, although it is not the root; the collective is reduce #2 of 9 Float"},
      {"broadcast", "differs from the root's tensor; the collective is broadcast #3 of 9 Float"},
      {"all_gather", "differs from the input of rank 0; the collective is all_gather #4 of 9"},
      {"reduce_scatter_each", sum + std::string("reduce_scatter #5 of 9 Float")},
      {"reduce_scatter_into", sum + std::string("reduce_scatter #6 of 9 Float")},
      {"reduce_scatter", sum + std::string("reduce_scatter #7 of 9 Float")},
      {"all_to_all", "differs from what rank 0 sent; the collective is all_to_all #9 of 3 Float"},
  };
  for (const auto& [wrong, text] : cases) {
    for (const auto& error : errors_of(wrong)) {
      EXPECT_THAT(error, HasSubstr("ProcessGroup: check_results: the result on rank 1 " + text))
          << wrong;
    }
  }
}

}  // namespace
}  // namespace tessera
