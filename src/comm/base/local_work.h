#pragma once

#include <exception>
#include <string>

#include <fmt/format.h>

#include "tessera/error.h"
#include "tessera/process_group.h"
#include "tessera/step/agreement.h"

namespace tessera::comm {

/// Runs `work`, which one rank does while others may wait for it in a collective of `group`, such
/// as reading a parameter from a file. If it throws, every rank throws UsageError with its message:
/// this one here, the others in that collective.
template <class Work>
void run_local_work(ProcessGroup group, const std::string& component, Work&& work) {
  std::string problem;
  try {
    work();
    return;
  } catch (const BrokenWorldError&) {
    throw;
  } catch (const std::exception& error) {
    if (group.size() == 1 || group.ended()) throw;
    problem = message_of(error);
  }
  group.fail(fmt::format("{}: rank {}: {}", component, group.rank(), problem));
}

}  // namespace tessera::comm
