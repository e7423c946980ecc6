#pragma once

#include "tessera/config/config_node.h"

namespace tessera::train {

/// Replaces the keys and values of section `parallel` of a config that PyTorch, mmengine and
/// MegEngine spell differently by Tessera's own. In other sections throws UsageError, with place
/// and Tessera's name, for their keys and types that are spelt differently or have no counterpart.
/// Local.
void use_own_spellings(ConfigNode& root);

}  // namespace tessera::train
