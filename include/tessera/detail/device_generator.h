#pragma once

#include <functional>

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The default generators of the devices of one type, if libtorch itself does not know them. Not
/// thread-safe. Local.
void set_device_generator(at::DeviceType type, std::function<at::Generator(at::Device)> generator);

/// The default generator of a device. Throws c10::Error where libtorch knows none and none was set.
/// Local.
at::Generator device_generator(at::Device device);

}  // namespace tessera::detail
#pragma GCC visibility pop
