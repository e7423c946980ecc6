#pragma once

#include <functional>
#include <string>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/detail/torch_compat.h"

namespace tessera::comm {

struct World;

/// The c10d backend through which the ranks of a group move tensors of an accelerator. It is needed
/// for broadcasts, sums, all_to_all and gathers of flat tensors, and it never gets a CPU tensor.
/// Its reduce() does not change the tensors of the other ranks.
struct DeviceBackend {
  at::DeviceType type;
  std::string name;  ///< For backend_name() and messages.
  /// Connects this rank with the other members of `world`. The keys of its store are for this
  /// backend alone. Collective.
  std::function<c10::intrusive_ptr<compat::C10dBackend>(const World& world)> connect;
  /// Ends the collectives that the device waits in, from any thread. Their data is undefined then.
  /// Not null; does not throw.
  std::function<void(compat::C10dBackend& backend)> abort;
  /// The name of a device on its host, independent of its number in this process. Two ranks of a
  /// host cannot use the same one. Null, or "": they can.
  std::function<std::string(at::Device device)> identity = nullptr;
};

}  // namespace tessera::comm
