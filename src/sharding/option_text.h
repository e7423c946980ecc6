#pragma once

#include <string>

#include "tessera/config/option_map.h"

namespace tessera::sharding {

/// "lr 0.1 momentum 0.9", for contracts and tags that compare options between ranks. lr comes
/// first, because a message shows only the beginning of a tag.
std::string option_text(const OptionMap& options);

}  // namespace tessera::sharding
