#pragma once

namespace tessera::comm {

/// See ProcessGroupOptions::retain_freed_memory.
void retain_freed_memory();

/// Gives what is free now back to the system, once: for after a model's parameters have moved into other storage.
void return_freed_memory();

}  // namespace tessera::comm
