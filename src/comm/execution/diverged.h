#pragma once

#include "tessera/error.h"

namespace tessera::comm {

/// The ranks have called different collectives, each in a DivergenceScope. No data was moved.
class Diverged : public UsageError {
 public:
  using UsageError::UsageError;
};

}  // namespace tessera::comm
