// ProcessGroup::with_device(): which connections carry the tensors of an accelerator.
#include <functional>
#include <string>

#include <c10/core/DeviceGuard.h>
#include <gmock/gmock.h>

#include "comm/device/backends.h"
#include "device/expect_success.h"
#include "device/loss.h"
#include "harness/device/device.h"
#include "harness/device/rank_processes.h"
#include "tessera/error.h"
#include "tessera/process_group.h"

namespace tessera::on_device {
namespace {

/// Each rank's part of a sum, on the device `index`, with a group that moves it.
void expect_sum(ProcessGroup group, int index, const std::string& what) {
  auto x = torch::full({5}, static_cast<float>(group.rank() + 1), device(index));
  group.all_reduce(x);
  auto y = x * 2;
  group.all_reduce_async(y, 1.0 / group.size()).wait();
  const float sum = static_cast<float>(group.size() * (group.size() + 1)) / 2;
  expect(x.cpu().eq(sum).all().item<bool>() && y.cpu().eq(2 * sum).all().item<bool>(), what);
}

void expect_no_error(const std::string& what, const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    expect(false, what + ": " + error.what());
  }
}

TEST(ChosenDevice, RanksWithDevicesOfTheirOwnUseTheirBackend) {
  for (const int world : {2, 3}) {
    if (world > devices()) continue;
    expect_success(world, [](Groups& groups) {
      const c10::DeviceGuard own(device(groups.rank()));
      comm::add_backend(backend(true));
      auto group = groups.cpu().with_device(device(groups.rank()));
      expect(group.backend_name() == backend_name(), group.backend_name());
      expect_sum(group, groups.rank(), "the sums");
      auto child = group.split(groups.rank() == 2 ? 1 : 0);
      if (child->size() > 1)
        expect(child->backend_name() == backend_name(), "the sub-group's backend");
      expect_sum(*child, groups.rank(), "the sums of a sub-group");
    });
  }
}

TEST(ChosenDevice, ADeviceWithoutANumberIsTheCurrentOne) {
  if (devices() < 2) GTEST_SKIP() << "needs two devices";
  expect_success(2, [](Groups& groups) {
    comm::add_backend(backend(true));
    const c10::DeviceGuard own(device(groups.rank()));
    auto group = groups.cpu().with_device(at::Device(type()));
    expect(group.backend_name() == backend_name(), group.backend_name());
    expect_sum(group, groups.rank(), "the sums");
  });
}

TEST(ChosenDevice, RanksOfOneDeviceCopyThroughTheHost) {
  expect_success(2, [](Groups& groups) {
    comm::add_backend(backend(true));
    auto cpu = groups.cpu();
    auto group = cpu.with_device(device());
    expect(group.backend_name() == cpu.backend_name(), group.backend_name());
    expect(group.moves(type()) && !cpu.moves(type()), "the new group moves the device's tensors");
    expect_sum(group, 0, "the sums");
    auto child = group.split(0);
    expect(child->backend_name() == cpu.backend_name(), child->backend_name());
    expect_sum(*child, 0, "the sums of a sub-group");
    auto again = group.with_device(device());
    expect(again.stats().calls() == group.stats().calls(), "no collective for the same group");
  });
}

TEST(ChosenDevice, BackendsThatAreNamedStay) {
  expect_success(2, [](Groups& groups) {
    comm::add_backend(backend(true));
    ProcessGroupOptions options;
    options.backend = Backend::TCP;
    auto group = groups.cpu(options).with_device(device(groups.rank()));
    expect(group.backend_name() == "tcp", group.backend_name());
    expect_sum(group, groups.rank(), "the sums");
    auto moving = groups.device();
    expect(moving.with_device(device(groups.rank())).backend_name() == backend_name(),
           "a group with the backend is returned itself");
  });
}

TEST(ChosenDevice, NothingChangesForTheCpuAndForOneRank) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.cpu();
    const auto calls = group.stats().calls();
    expect(group.with_device(at::kCPU).stats().calls() == calls, "no collective for the CPU");
    expect_no_error("one rank",
                    [] { expect_sum(ProcessGroup().with_device(device()), 0, "sums"); });
  });
}

TEST(ChosenDevice, MistakesAreErrorsOfAllRanks) {
  expect_success(2, [](Groups& groups) {
    auto group = groups.cpu();
    expect_contains(
        error_of(
            [&] { group.with_device(groups.rank() == 1 ? at::Device(type(), 100) : device()); }),
        "ProcessGroup.with_device: rank 1 sees no device " + c10::DeviceTypeName(type(), true));
    expect_contains(error_of([&] { group.with_device(at::kXPU); }), "sees no device xpu");
    expect_contains(
        error_of([&] { group.with_device(groups.rank() == 1 ? at::Device(at::kXPU) : device()); }),
        "ProcessGroup.with_device: the ranks differ");
    expect_sum(group.with_device(device()), 0, "the sums afterwards");
    ProcessGroupOptions options;
    options.check_results = true;
    expect_contains(error_of([&] { groups.cpu(options).with_device(device()); }),
                    "check_results is true");
  });
}

}  // namespace
}  // namespace tessera::on_device
