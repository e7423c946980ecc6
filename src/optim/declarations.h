#pragma once

#include <optional>
#include <typeindex>

#include "tessera/optim/optimizer_state.h"

namespace tessera::optim {

/// The adapter that was declared for the optimizer's class, if any.
std::optional<StateAdapter> declared_adapter(const torch::optim::Optimizer& optimizer);

}  // namespace tessera::optim
