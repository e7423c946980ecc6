#pragma once

#include "tessera/config/config_node.h"

namespace tessera::train {

/// Replaces the keys and values of section `parallel` that PyTorch, mmengine and MegEngine spell
/// otherwise by Tessera's own. Throws UsageError, with the place, for a key of theirs that has no
/// counterpart. Local.
void use_own_spellings(ConfigNode& parallel);

}  // namespace tessera::train
