#pragma once

#include <string>

#include "tessera/config/config_node.h"

namespace tessera::train {

/// Replaces the keys and values of section `parallel` of a config that PyTorch, mmengine and
/// MegEngine spell differently by Tessera's own; UsageError, with place and Tessera's name, for
/// those that correspond to no option. Local.
void use_own_spellings(ConfigNode& root);

/// `error` is that of reading the config: if the unknown key in it, or a type in the config, is one
/// of PyTorch or mmengine, throws UsageError with place and Tessera's name. Local.
void suggest_own_names(const ConfigNode& root, const std::string& error);

}  // namespace tessera::train
