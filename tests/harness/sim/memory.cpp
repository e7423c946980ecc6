#include "harness/sim/memory.h"

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "harness/sim/streams.h"
#include "tessera/detail/torch_compat.h"

namespace tessera::sim {
namespace {

constexpr size_t kArena = size_t{16} << 30;
constexpr size_t kRounding = 512;
/// The same offsets in two mappings: the device's addresses, which fault, and the kernels'.
char* device_base = nullptr;
char* kernel_base = nullptr;

struct Block {
  char* data;
  size_t bytes;
  c10::Stream stream;
  std::vector<c10::Stream> used_on;
};

std::mutex mutex;
size_t top = 0;
using Key = std::tuple<c10::DeviceIndex, c10::StreamId, size_t>;
std::map<Key, std::vector<char*>> freed;
std::map<char*, Block*> live;

Key key_of(const Block& block) {
  return {block.stream.device_index(), block.stream.id(), block.bytes};
}

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  count_release(static_cast<int64_t>(block->bytes));
  std::lock_guard lock(mutex);
  live.erase(block->data);
  if (block->used_on.empty()) return freed[key_of(*block)].push_back(block->data);
  const auto left = std::make_shared<std::atomic<size_t>>(block->used_on.size());
  for (const auto& stream : block->used_on) {
    queue_of(stream).enqueue([left, key = key_of(*block), data = block->data] {
      if (--*left > 0) return;
      std::lock_guard later(mutex);
      freed[key].push_back(data);
    });
  }
}

class DeviceAllocator final : public compat::Allocator {
 public:
  at::DataPtr serve(size_t bytes) const override {
    const int index = current_device();
    if (bytes == 0) return {nullptr, sim::device(index)};
    bytes = (bytes + kRounding - 1) / kRounding * kRounding;
    auto* block = new Block{nullptr, bytes, current_stream(index), {}};
    {
      std::lock_guard lock(mutex);
      auto& same = freed[key_of(*block)];
      count_allocation(static_cast<int64_t>(bytes), !same.empty());
      if (!same.empty()) {
        block->data = same.back();
        same.pop_back();
      } else {
        TORCH_CHECK(top + bytes <= kArena, "sim: out of memory");
        block->data = device_base + top;
        top += bytes;
      }
      live[block->data] = block;
    }
    queue_of(block->stream).enqueue([to = kernel_address(block->data), bytes] {
      std::memset(to, 0xff, bytes);  // NaN in each dtype of floating-point numbers
    });
    return {block->data, block, &release, sim::device(index)};
  }
};

std::mutex pinned_mutex;
std::map<const char*, size_t> pinned_ranges;

class PinnedAllocator final : public compat::Allocator {
 public:
  at::DataPtr serve(size_t bytes) const override {
    constexpr size_t kAlignment = 64;
    auto* data = static_cast<char*>(
        std::aligned_alloc(kAlignment, (bytes + 2 * kAlignment - 1) / kAlignment * kAlignment));
    std::lock_guard lock(pinned_mutex);
    pinned_ranges[data] = bytes;
    const auto free = [](void* freed_data) {
      std::lock_guard later(pinned_mutex);
      // A copy that still reads it gets wrong values.
      const auto range = pinned_ranges.find(static_cast<char*>(freed_data));
      std::memset(freed_data, 0xff, range->second);
      pinned_ranges.erase(range);
      std::free(freed_data);
    };
    return {data, data, free, at::Device(at::kCPU)};
  }
};

DeviceAllocator the_device_allocator;
PinnedAllocator the_pinned_allocator;

/// A fault inside the arena is the host's. Any other keeps its usual end.
void on_fault(int signal, siginfo_t* info, void*) {
  const auto* address = static_cast<const char*>(info->si_addr);
  if (address >= device_base && address < device_base + kArena) {
    constexpr char kText[] =
        "sim: the host touched memory of the device without copying it; expected a kernel or a "
        "copy to the CPU\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, kText, sizeof(kText) - 1);
    ::_exit(kHostAccess);
  }
  std::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

void start_memory() {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  device_base = static_cast<char*>(::mmap(nullptr, kArena, PROT_NONE, flags, -1, 0));
  kernel_base = static_cast<char*>(::mmap(nullptr, kArena, PROT_READ | PROT_WRITE, flags, -1, 0));
  TORCH_CHECK(device_base != MAP_FAILED && kernel_base != MAP_FAILED, "sim: cannot map the arena");
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
  c10::SetAllocator(kType, &the_device_allocator);
}

c10::Allocator* device_allocator() { return &the_device_allocator; }
c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* data) {
  std::lock_guard lock(pinned_mutex);
  auto after = pinned_ranges.upper_bound(static_cast<const char*>(data));
  if (after == pinned_ranges.begin()) return false;
  const auto [begin, bytes] = *--after;
  return static_cast<const char*>(data) < begin + bytes;
}

char* kernel_address(void* data) { return static_cast<char*>(data) - device_base + kernel_base; }

void record_use(const void* data, const c10::Stream& stream) {
  std::lock_guard lock(mutex);
  const auto found = live.find(static_cast<char*>(const_cast<void*>(data)));
  if (found == live.end() || found->second->stream == stream) return;
  for (const auto& known : found->second->used_on)
    if (known == stream) return;
  found->second->used_on.push_back(stream);
}

at::Tensor pinned_empty(int64_t numel) {
  auto data = pinned_allocator()->allocate(numel * sizeof(float));
  auto* const address = static_cast<float*>(data.get());
  auto owner = std::make_shared<at::DataPtr>(std::move(data));
  return at::from_blob(
      address, {numel}, [owner](void*) mutable { owner.reset(); }, at::kFloat);
}

}  // namespace tessera::sim
