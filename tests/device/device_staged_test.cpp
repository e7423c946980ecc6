// A group without a backend for the device, whose tensors travel through the host.
#include <chrono>
#include <functional>
#include <thread>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include "device/expect_success.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::on_device {
namespace {

template <class ErrorType>
void expect_error(const std::string& part, const std::function<void()>& call) {
  std::string text = "no error";
  try {
    call();
  } catch (const ErrorType& error) {
    text = error.what();
  }
  expect(text.find(part) != std::string::npos, "'" + part + "' in '" + text + "'");
}

TEST(StagedDevice, CollectivesWaitForWhatWasIssuedBefore) {
  for (const int world : {2, 3}) {
    expect_success(world, [world](Groups& groups) {
      const auto here = device(groups.rank());
      const c10::DeviceGuard own(here);
      auto group = groups.staged();
      auto x = torch::ones({300}, here);
      for (int i = 0; i < 20; ++i) {
        x = x * 2;
        group.all_reduce(x, 0.5 / world);
        x = x * 2;
        group.all_reduce_async(x, 0.5 / world, "mean").wait();
      }
      expect(x.cpu().eq(1).all().item<bool>(), "the means");
    });
  }
}

TEST(StagedDevice, AsynchronousCollectivesRunBesideTheCallerInTheirOrder) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.staged(), signals = groups.cpu();
    auto x = torch::full({64}, 2.f, device()), y = torch::full({32}, 3.f, device());
    if (groups.rank() == 1) signals.barrier();
    auto first = group.all_reduce_async(x), second = group.all_reduce_async(y);
    const auto z = torch::ones({64}, device()) * 5;
    if (groups.rank() == 0) {
      expect(z.cpu()[0].item<float>() == 5, "the product, before the other rank gives its part");
      expect(!first.done() && !second.done(), "no sum without the other rank");
      signals.barrier();
    }
    group.broadcast(z, 1);  // behind both
    first.wait();
    second.wait();
    expect((x + z).cpu()[0].item<float>() == 9 && y.cpu()[0].item<float>() == 6, "the sums");
    expect(first.done() && second.done(), "done after the data has been read");
  });
}

TEST(StagedDevice, ABlockingCollectiveBehindAnotherOneUsesTheCallersStream) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.staged();
    const c10::StreamGuard aside(
        c10::impl::VirtualGuardImpl(type()).getStreamFromGlobalPool(device(), false));
    for (int i = 0; i < 20; ++i) {
      const auto x = torch::ones({64}, device());
      auto first = group.all_reduce_async(x);
      auto y = torch::ones({64}, device());
      for (int k = 0; k < 4; ++k) y = y * 1;
      group.all_reduce(y, 0.5);  // on another thread, because the first one may still run
      first.wait();
      expect(y.cpu().eq(1).all().item<bool>() && x.cpu().eq(2).all().item<bool>(), "the sums");
    }
  });
}

TEST(StagedDevice, ATensorThatIsFreedEarlyKeepsItsMemory) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.staged();
    for (int i = 0; i < 40; ++i) {
      auto work = group.all_reduce_async(torch::ones({256}, device()));
      // The host has perhaps carried it out, and the device has the copy of the sum before it.
      std::this_thread::sleep_for(std::chrono::microseconds(20 * i));
      const auto other = torch::full({256}, 7.f, device());
      work.wait();
      const auto later = torch::full({256}, 8.f, device());
      expect(other.cpu().eq(7).all().item<bool>() && later.cpu().eq(8).all().item<bool>(),
             "the other tensors' values");
    }
  });
}

TEST(StagedDevice, PinnedMemoryIsUsedAgainOnlyWhenTheDeviceHasReadIt) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.staged();
    std::vector<at::Tensor> all;
    std::vector<Work> works;
    // Rank 1 sends no data to the host, so its host waits for nothing but the other rank.
    for (int i = 0; i < 30; ++i) {
      all.push_back(torch::full({128}, static_cast<float>(i), device()));
      if (groups.rank() == 1) all.back().zero_();
      works.push_back(group.broadcast_async(all.back(), 0));
    }
    for (auto& work : works) work.wait();
    for (int i = 0; i < 30; ++i)
      expect(all[i].cpu().eq(i).all().item<bool>(), "broadcast " + std::to_string(i));
  });
}

TEST(StagedDevice, TheEndOfAGroupKeepsMemoryThatTheDeviceReads) {
  expect_success(2, [](Groups& groups) {
    auto x = torch::full({4096}, static_cast<float>(groups.rank()), device());
    for (int i = 0; i < 20; ++i) x = x * 1;
    groups.staged().broadcast(x, 1);
    std::vector<at::Tensor> others;  // would get the same memory
    for (int i = 0; i < 20; ++i) others.push_back(torch::full({4096}, -1.f));
    expect(x.cpu().eq(1).all().item<bool>(), "the values");
  });
}

TEST(StagedDevice, DisagreementsAndFailuresAreErrorsBeforeDataMoves) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.staged();
    const auto x = torch::ones({groups.rank() + 4}, device());
    expect_error<UsageError>("the ranks disagree", [&] { group.all_reduce(x); });
    expect_error<UsageError>("no data was moved", [&] { group.all_reduce_async(x).wait(); });
    const auto mixed = groups.rank() == 0 ? x : x.cpu();
    expect_error<UsageError>("on the device", [&] { group.broadcast(mixed.narrow(0, 0, 4), 0); });
    if (devices() > 1)
      expect_error<UsageError>("expected one device for each rank",
                               [&] { group.all_reduce(torch::ones({4}, device(1))); });
    auto ones = torch::ones({3}, device());
    group.all_reduce(ones);
    expect(ones.cpu()[0].item<float>() == 2, "a later sum");
    expect_error<UsageError>("rank 1 has no data", [&] {
      if (group.rank() == 1) group.fail("rank 1 has no data");
      group.all_reduce_async(ones).wait();
    });
  });
}

TEST(StagedDevice, SubGroupsStageToo) {
  expect_success(3, [](Groups& groups) {
    const c10::DeviceGuard own(device(groups.rank()));
    auto group = groups.staged();
    auto child = group.split(groups.rank() == 2 ? 1 : 0);
    auto ones = torch::ones({2}, device(groups.rank()));
    child->all_reduce(ones);
    expect(ones.cpu()[0].item<float>() == (groups.rank() == 2 ? 1 : 2), "the sub-group's sum");
  });
}

TEST(StagedDevice, WrongOptionsAreErrors) {
  expect_success(2, [](Groups& groups) {
    ProcessGroupOptions options;
    options.backend = Backend::NCCL;
    expect_error<UsageError>(
        "staged_device is " + c10::DeviceTypeName(type(), true) + ", and the backend is NCCL",
        [&] { groups.staged(options); });
    options.backend = Backend::Auto;
    options.check_results = true;
    expect_error<UsageError>("check_results is true", [&] { groups.staged(options); });
    options.check_results = false;
    options.staged_device = at::kXPU;
    expect_error<UsageError>("staged_device is xpu, and this process sees no such device",
                             [&] { groups.cpu(options); });
  });
}

}  // namespace
}  // namespace tessera::on_device
