#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/c.h"
#include "tessera/error.h"
#include "tessera/train/training_session.h"

// The objects to which the handles of the C interface refer.

struct tessera_group {
  tessera::ProcessGroup group;
};

struct tessera_session {
  tessera::TrainingSession session;
  std::vector<std::string> names;  // of the parameters
};

namespace tessera::c {

/// UsageError for a null pointer.
inline void need(const void* pointer, const char* function, const char* argument) {
  if (pointer == nullptr)
    throw UsageError(std::string(function) + ": " + argument + " is NULL; expected a pointer");
}

/// Checks the arguments of a collective call. An error on one rank is an error on all: the others
/// meet the barrier in their next collective.
inline void check_arguments(ProcessGroup group, const std::function<void()>& check) {
  try {
    check();
  } catch (const UsageError& error) {
    group.barrier(error.what());
    throw;
  }
}

}  // namespace tessera::c
