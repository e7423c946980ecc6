#pragma once

#include <functional>
#include <string>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

// The devices that the config key model.device can name: "cpu" and "cuda" from the start. A program
// adds another one, whose libtorch extension it has loaded, before it reads a config.

#pragma GCC visibility push(default)
namespace tessera {

/// One type of device.
struct DeviceKind {
  at::DeviceType type;
  /// The default generator of a device of this type. It is seeded with the config's seed, and its
  /// state is part of checkpoints. Empty: random numbers on the device come from the CPU's one.
  std::function<at::Generator(at::Device device)> generator = {};
};

namespace registry {

/// Throws UsageError when the name is empty, has a colon or is taken. Not thread-safe.
void add_device(const std::string& name, DeviceKind kind);

}  // namespace registry

/// "" if `text` is the name of a known device, alone or, but for "cpu", with a number ("cuda:1").
/// Otherwise the fault. Local.
std::string device_problem(const std::string& text);

/// The device that `text` names for this rank. Without a number: the one numbered as the rank on
/// its host, modulo the number of devices. Throws UsageError for a text with a device_problem(),
/// and where this process sees no such device. Local.
at::Device device_of(const std::string& text, int local_rank);

/// The default generator of a device: the CPU's if its kind has none. Throws UsageError for a type
/// that no registered kind has. Local.
at::Generator generator_of(at::Device device);

}  // namespace tessera
#pragma GCC visibility pop
