#pragma once

namespace tessera::train {

/// Prepares write_thread_stacks(): loads the unwinder, and installs a handler for a real-time
/// signal that has none. Called again, it does nothing.
void prepare_thread_stacks();

/// Writes the stack of every other thread of this process to file descriptor `fd`, one function a
/// line, in mangled names (c++filt makes them readable). Each thread is interrupted by the signal
/// and walks its own stack, so it may be spinning or waiting. Allocates nothing. A thread that
/// blocks the signal, or that does not answer within a second, is named without a stack.
void write_thread_stacks(int fd) noexcept;

}  // namespace tessera::train
