#pragma once

#include <chrono>
#include <csignal>
#include <functional>
#include <string>
#include <thread>

#include <torch/types.h>
#include <unistd.h>

#include "harness/device/device.h"
#include "harness/device/rank_processes.h"

namespace tessera::on_device {

/// The text of the error that `call` throws.
inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

inline void expect_contains(const std::string& text, const std::string& part) {
  expect(text.find(part) != std::string::npos, "'" + part + "' in '" + text + "'");
}

/// Keeps the device busy for a while, from the current stream's point of view. `kernels`: of the
/// simulated one.
inline void keep_busy(int kernels = 2000) {
  if (has_kernels_of_cpu()) {
    auto x = torch::ones({4}, device());
    for (int i = 0; i < kernels; ++i) x = x * 1;
    return;
  }
  const auto large = torch::ones({8192, 8192}, device());
  for (int i = 0; i < 30; ++i) torch::mm(large, large);
}

using MakeGroup = std::function<ProcessGroup(Groups&, ProcessGroupOptions)>;

/// Rank 1 gets the signal when it has issued its part of a collective and the device has not run
/// it. Rank 0 waits for the device, where no header is exchanged any more. Returns rank 0's error.
inline std::string after_loss(int signal, const MakeGroup& make) {
  const auto errors = run_processes(2, 1, [&](Groups& groups) {
    ProcessGroupOptions options;
    options.timeout = std::chrono::seconds(3);
    auto group = make(groups, options), signals = groups.cpu();
    const auto processes = signals.all_gather_bytes(std::to_string(::getpid()));
    const auto x = torch::ones({64}, device());
    group.all_reduce(x);
    if (group.rank() == 1) keep_busy();
    group.all_reduce_async(x).wait();
    signals.barrier();
    if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::seconds(30));
    const pid_t other = std::stoi(processes[1]);
    const auto start = std::chrono::steady_clock::now();
    ::kill(other, signal);
    const auto text = error_of([&] {
      x.sum().item<float>();
      group.all_reduce(x);
    });
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    error_of([] { synchronize(); });
    ::kill(other, SIGKILL);
    expect_contains(text, "rank 1");
    expect(took.count() < 5, "found within 5 s, not " + std::to_string(took.count()));
  });
  return errors[0];
}

}  // namespace tessera::on_device
