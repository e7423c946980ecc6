#pragma once

#include <string>

#include "tessera/process_group.h"

namespace tessera::train {

struct CheckpointToResume {
  std::string path;     ///< "": there is none.
  std::string warning;  ///< What is wrong with the newest one; "": nothing.
};

/// The newest sound checkpoint of the folder, or the newest one if none is sound. Collective.
CheckpointToResume checkpoint_to_resume(const std::string& folder, const ProcessGroup& group);

}  // namespace tessera::train
