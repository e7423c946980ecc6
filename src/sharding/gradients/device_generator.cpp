#include "tessera/detail/device_generator.h"

#include <map>
#include <utility>

#include <ATen/Context.h>

namespace tessera::detail {
namespace {

using GeneratorOf = std::function<at::Generator(at::Device)>;

std::map<at::DeviceType, GeneratorOf>& known() {
  static auto& generators = *new std::map<at::DeviceType, GeneratorOf>();
  return generators;
}

}  // namespace

void set_device_generator(at::DeviceType type, GeneratorOf generator) {
  known()[type] = std::move(generator);
}

at::Generator device_generator(at::Device device) {
  const auto found = known().find(device.type());
  return found != known().end() ? found->second(device)
                                : at::globalContext().defaultGenerator(device);
}

}  // namespace tessera::detail
