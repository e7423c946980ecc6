// Groups with an accelerator: a c10d backend that refuses CPU tensors, beside a transport for them.
#include <chrono>
#include <functional>
#include <numeric>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <gmock/gmock.h>

#include "device/expect_success.h"
#include "device/loss.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "harness/means.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::on_device {
namespace {

/// The results of one of each collective on tensors of `where`.
std::vector<at::Tensor> results(ProcessGroup& group, at::Device where) {
  const int rank = group.rank(), size = group.size();
  const auto input = [&] { return (torch::arange(7, at::kFloat) * 0.1 + rank).to(where); };
  std::vector<int64_t> counts(size, 7 / size);
  counts.back() += 7 % size;
  std::vector<at::Tensor> all;
  const auto make = [&] { return all.emplace_back(input()); };
  group.all_reduce(make(), 1.0 / size);
  const auto reduced = make();
  group.reduce(reduced, size - 1);
  if (rank != size - 1) all.pop_back();
  group.broadcast(make(), 1);
  group.all_gather(make(), counts);
  all.push_back(group.all_gather(input()));
  const auto scattered = input();
  group.reduce_scatter(scattered, counts);
  const int64_t begin = std::accumulate(counts.begin(), counts.begin() + rank, int64_t{0});
  all.push_back(scattered.narrow(0, begin, counts[rank]));
  auto into = torch::empty({counts[rank]}, where);
  group.reduce_scatter_into_async(input(), counts, into, 0.5).wait();
  all.push_back(into);
  const auto from = input().narrow(0, 0, size).contiguous();
  const auto to = torch::empty({size}, where);
  group.all_to_all(to, from, std::vector<int64_t>(size, 1), std::vector<int64_t>(size, 1));
  all.push_back(to);
  for (auto& tensor : all) tensor = tensor.cpu();
  return all;
}

TEST(DeviceTransport, CollectivesHaveTheBitsOfTheCpu) {
  for (const int world : {2, 3}) {
    expect_success(world, [](Groups& groups) {
      auto cpu = groups.cpu(), there = groups.device(), staged = groups.staged();
      expect(there.backend_name() == backend_name(), "the backend's name");
      expect(staged.backend_name() == "shm", "the name of what carries staged tensors");
      const auto expected = results(cpu, at::kCPU);
      for (auto* group : {&there, &staged}) {
        expect(group->control_device().is_cpu(), "the device of control tensors");
        for (const auto where : {device(0), at::Device(at::kCPU)}) {
          const auto got = results(*group, where);
          for (size_t i = 0; i < expected.size(); ++i)
            expect(got[i].equal(expected[i]), "result " + std::to_string(i));
        }
      }
    });
  }
}

TEST(DeviceTransport, MeansOf16BitsAreScaledBeforeTheyAreRounded) {
  for (const int world : {2, 3}) {
    expect_success(world, [](Groups& groups) {
      auto there = groups.device(), staged = groups.staged();
      for (auto* group : {&there, &staged}) {
        const auto wrong = testing::first_wrong_mean(*group, device(0));
        expect(wrong.empty(), wrong);
      }
    });
  }
}

TEST(DeviceTransport, ControlMessagesDoNotUseTheDevice) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.device();
    reset_stats();
    const auto mine = "rank " + std::to_string(group.rank());
    expect(group.all_gather_bytes(mine).at(1) == "rank 1", "all_gather_bytes");
    expect(group.gather_bytes(mine, 0).size() == (group.rank() == 0 ? 2u : 0u), "gather_bytes");
    expect(group.broadcast_bytes(mine, 1) == "rank 1", "broadcast_bytes");
    group.barrier();
    group.check_contract("Part", {"same"});
    expect_contains(error_of([&] { group.check_contract("Part", {mine}); }),
                    "Part: the ranks diff");
    auto child = group.split(0);
    expect(child && child->backend_name() == backend_name(), "the sub-group's backend");
    expect(stats().kernels == 0 && stats().host_waits == 0, "no use of the device");
    auto ones = torch::ones({2}, device());
    child->all_reduce(ones);
    expect(ones.cpu()[0].item<float>() == 2, "the sub-group's sum");
  });
}

TEST(DeviceTransport, AFailureIsAnnouncedWhereTheDeviceIsNotTheFirst) {
  expect_success(2, [](Groups& groups) {
    const c10::DeviceGuard own(device(groups.rank() + 1));  // none is on device 0
    auto group = groups.device();
    auto ones = torch::ones({4}, device(groups.rank() + 1));
    group.all_reduce_async(ones).wait();
    expect(ones.cpu()[0].item<float>() == 2, "the sum");
    const auto text = error_of([&] {
      if (group.rank() == 1) group.fail("rank 1 has no data");
      group.all_reduce_async(torch::ones({4}, device(1))).wait();
    });
    expect_contains(text, "rank 1 has no data");
    error_of([] { synchronize(); });  // rank 1 has left without its part of the sum
    expect(current_stream(0) == c10::Stream(c10::Stream::DEFAULT, device(0)), "no stream switched");
  });
}

TEST(DeviceTransport, ChecksDoNotMakeTheHostWaitForTheDevice) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.device();
    auto x = torch::ones({64}, device());
    reset_stats();
    for (int i = 0; i < 30; ++i) {
      x = x * 0.5;
      group.all_reduce_async(x, 1, "sum").wait();
    }
    expect(stats().host_waits == 0, "no wait of the host");
    expect(x.cpu()[0].item<float>() == 1, "the sum");
  });
}

/// Whether the stream has soon run what is issued on it so far.
bool finishes(const c10::Stream& stream) {
  c10::Event end(type());
  end.record(stream);
  for (int milliseconds = 0; milliseconds < 5000 && !end.query(); ++milliseconds)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return end.query();
}

TEST(DeviceTransport, AsynchronousCollectivesRunBesideTheComputeStream) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.device(), signals = groups.cpu();
    const auto x = torch::full({64}, 2.f, device());
    // The first collective connects the ranks, and CUDA may load a kernel when it is first
    // used.
    group.all_reduce(torch::ones({64}, device()) * 3);
    (x + x).cpu();
    if (groups.rank() == 1) signals.barrier();
    auto work = group.all_reduce_async(x);
    const auto y = torch::ones({64}, device()) * 3;
    if (groups.rank() == 0) {
      expect(finishes(current_stream()), "the product, before the other rank gives its part");
      expect(!work.done(), "no sum without the other rank");
      signals.barrier();
    }
    work.wait();
    expect((x + y).cpu()[0].item<float>() == 7, "the sum after wait()");
    expect(work.done(), "done after the data has been read");
  });
}

TEST(DeviceTransport, ATensorThatIsFreedEarlyKeepsItsMemoryUntilTheCollectiveHasRun) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.device();
    for (int i = 0; i < 20; ++i) {
      auto work = group.all_reduce_async(torch::ones({256}, device()));
      const auto other = torch::full({256}, 7.f, device());  // would get the same memory
      work.wait();
      expect(other.cpu().eq(7).all().item<bool>(), "the other tensor's values");
    }
  });
}

TEST(DeviceTransport, AGroupThatEndsLetsTheDeviceFinish) {
  expect_success(2, [](Groups& groups) {
    auto x = torch::ones({64}, device());
    {
      auto group = groups.device();
      for (int i = 0; i < 10; ++i) group.all_reduce(x, 0.5);
    }
    expect(x.cpu().eq(1).all().item<bool>(), "the mean");
  });
}

TEST(DeviceTransport, ARankThatEndsBeforeTheFirstCollectiveIsAnErrorOfTheOthers) {
  for (const bool check : {true, false}) {
    expect_success(2, [check](Groups& groups) {
      ProcessGroupOptions options;
      options.check_collectives = check;
      auto group = groups.device(options);
      if (group.rank() == 1) return;
      const auto start = std::chrono::steady_clock::now();
      expect_contains(error_of([&] { group.all_reduce_async(torch::ones({4}, device())).wait(); }),
                      "rank 1");
      expect(std::chrono::steady_clock::now() - start < std::chrono::seconds(10), "at once");
    });
  }
}

ProcessGroup on_the_device(Groups& groups, ProcessGroupOptions options) {
  return groups.device(options);
}

TEST(DeviceTransport, ARankThatIsKilledWhileTheHostWaitsForTheDeviceIsFound) {
  EXPECT_EQ(after_loss(SIGKILL, on_the_device), "");
}

TEST(DeviceTransport, ARankThatIsStoppedWhileTheHostWaitsForTheDeviceIsFound) {
  EXPECT_EQ(after_loss(SIGSTOP, on_the_device), "");
}

TEST(DeviceTransport, TwoRanksOnOneDeviceAreAnError) {
  expect_success(
      2,
      [](Groups& groups) {
        auto group = groups.with(backend(/*exclusive=*/true));
        const auto x = torch::ones({4}, device());
        const auto text = error_of([&] { group.all_reduce_async(x).wait(); });
        expect_contains(text, "ranks 0 and 1 use the same");
        expect_contains(text, "expected another device for one of them");
      },
      1);
}

TEST(DeviceTransport, AGroupUsesOneDevice) {
  expect_success(
      2,
      [](Groups& groups) {
        auto group = groups.device();
        group.all_reduce(torch::ones({3}, device()));
        if (devices() == 1) return;
        expect_contains(error_of([&] { group.all_reduce(torch::ones({3}, device(1))); }),
                        "expected one device for each rank");
      },
      1);
}

TEST(DeviceTransport, ADisagreementIsAnErrorWhenTheCollectiveIsWaitedFor) {
  const auto disagree = [](Groups& groups) {
    auto group = groups.device();
    const auto x = torch::ones({4}, device());
    group.broadcast(x, 0);  // the first one's headers are compared before
    const char* const tag = group.rank() == 0 ? "weights" : "gradients";
    auto work = group.broadcast_async(x, 0, tag);
    const auto text = error_of([&] { work.wait(); });
    expect_contains(text, "the ranks disagree about a collective");
    expect_contains(text, "gradients");
    expect_contains(text, "the device may have moved data");
    expect_contains(error_of([&] { group.broadcast(x, 0); }), "the group has ended");
    error_of([] { synchronize(); });  // the other rank may have left before its part of the data
  };
  expect_success(2, disagree, 2);
}

TEST(DeviceTransport, ABlockingDisagreementIsFoundBeforeDataMoves) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.device();
    const auto x = torch::ones({groups.rank() + 4}, device());
    expect_contains(error_of([&] { group.all_reduce(x); }), "the ranks disagree");
    const auto mixed = groups.rank() == 0 ? x : x.cpu();
    expect_contains(error_of([&] { group.broadcast(mixed.narrow(0, 0, 4), 0); }), "on the device");
    auto ones = torch::ones({3}, device());
    group.all_reduce(ones);
    expect(ones.cpu()[0].item<float>() == 2, "a later sum");
  });
}

TEST(DeviceTransport, TensorsOfAnotherDeviceAreAnError) {
  expect_success(
      2,
      [](Groups& groups) {
        auto group = groups.cpu();
        expect_contains(error_of([&] { group.all_reduce(torch::ones({3}, device())); }),
                        "moves CPU tensors");
      },
      1);
}

}  // namespace
}  // namespace tessera::on_device
