#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// A process, told apart from later ones that get the same number.
struct ProcessIdentity {
  int32_t pid = 0;
  uint64_t start_time = 0;  ///< Clock ticks after boot (/proc/<pid>/stat, field 22).

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

ProcessIdentity this_process();

/// False once the process has ended, whether or not its parent has noticed, or its number belongs
/// to another. A stopped process is alive. Costs about 20 us.
bool is_alive(const ProcessIdentity& process);

/// Names the set of processes that see each other's /proc: the boot of the host and the pid
/// namespace.
std::string host_identity();

/// Bytes of memory that can be had without killing anything: the system's and the control group's
/// view.
int64_t available_memory();

/// Processors that this process may run on.
int usable_processors();

}  // namespace tessera::comm
