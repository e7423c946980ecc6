#pragma once

#include <cstdint>
#include <string>

namespace tessera::comm {

/// Identifies a process, and distinguishes it from later processes with the same pid.
struct ProcessIdentity {
  int32_t pid = 0;
  uint64_t start_time = 0;  ///< Clock ticks after boot (/proc/<pid>/stat, field 22).

  friend bool operator==(const ProcessIdentity&, const ProcessIdentity&) = default;
};

ProcessIdentity this_process();

/// False when the process has ended, even if its parent has not reaped it, or when its pid belongs
/// to another process. A stopped process is alive. Takes about 20 us.
bool is_alive(const ProcessIdentity& process);

/// True while a signal or a debugger has stopped the process.
bool is_stopped(const ProcessIdentity& process);

/// Identifies the set of processes that see each other's /proc: boot id of the host and pid
/// namespace.
std::string host_identity();

/// Bytes of memory that can be allocated without invoking the OOM killer: the smaller value of the
/// system and of the control group.
int64_t available_memory();

/// The number of processors that this process may run on.
int usable_processors();

}  // namespace tessera::comm
