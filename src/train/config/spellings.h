#pragma once

#include "tessera/config/config_node.h"

namespace tessera::train {

/// Replaces the keys and values of section `parallel` of a config that PyTorch, mmengine and
/// MegEngine spell otherwise by Tessera's own. Throws UsageError, with the place and the own name,
/// for a key or a type of theirs that is spelt otherwise elsewhere or has no counterpart. Local.
void use_own_spellings(ConfigNode& root);

}  // namespace tessera::train
