#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace tessera::sim {

/// Reserves the arena, registers the allocator, and makes host access end the process with a text.
void start_memory();
/// Of the current device and its current stream.
c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* data);
/// Where kernels find the memory at this address of the device.
char* kernel_address(void* data);
/// The memory is not handed out again before `stream` has run what is enqueued when it is freed.
void record_use(const void* data, const c10::Stream& stream);

}  // namespace tessera::sim
