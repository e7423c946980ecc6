#pragma once

#include <functional>
#include <string>

#include "comm/store/addresses.h"

namespace tessera::comm {

/// This many random characters of 0 to 9 and a to f; an even number.
std::string random_token(size_t characters);

/// The secret that the ranks of a world over hosts share: TESSERA_SECRET, else the content of the
/// file TESSERA_SECRET_FILE without line ends at its end; empty if neither variable is set. `get`
/// returns the value of an environment variable or null. Throws UsageError for a secret of fewer
/// than 16 bytes or 8 different ones, and for a file that cannot be read, is no regular file, is
/// not this user's, or may be read or written by other users (expected mode: 0600 or 0400). No
/// message contains the secret.
std::string read_secret(const std::function<const char*(const char* name)>& get, int rank,
                        const Caller& caller = {});

}  // namespace tessera::comm
