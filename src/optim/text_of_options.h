#pragma once

#include <string>

#include "tessera/config/option_map.h"

namespace tessera {

/// "lr 0.1 momentum 0.9", for contracts and tags that compare options between ranks. lr comes
/// first, because a message shows only the beginning of a tag.
std::string text_of_options(const OptionMap& options);

}  // namespace tessera
