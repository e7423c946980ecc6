// The device's streams, events and hooks, as libtorch asks for them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "harness/sim/generators.h"
#include "harness/sim/memory.h"
#include "harness/sim/streams.h"
#include "tessera/detail/torch_compat.h"
#if TESSERA_TORCH_AT_LEAST(2, 4)
#include <ATen/detail/PrivateUse1HooksInterface.h>
#endif

namespace tessera::sim {
namespace {

using c10::DeviceIndex;
using c10::Stream;
using EventPtr = std::shared_ptr<EventState>;

EventPtr& event_at(void* event) { return *static_cast<EventPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  at::Device exchangeDevice(at::Device to) const override {
    return device(exchange_device(std::max<int>(to.index(), 0)));
  }
  at::Device getDevice() const override { return device(current_device()); }
  void setDevice(at::Device to) const override { exchangeDevice(to); }
  void uncheckedSetDevice(at::Device to) const noexcept override { exchangeDevice(to); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }

  Stream getStream(at::Device of) const noexcept override { return current_stream(index(of)); }
  Stream getDefaultStream(at::Device of) const override { return stream_of(index(of), 0); }
  Stream getStreamFromGlobalPool(at::Device of, bool) const override {
    return next_stream(index(of));
  }
  Stream exchangeStream(Stream to) const noexcept override { return exchange_stream(to); }
  bool queryStream(const Stream& stream) const override { return queue_of(stream).idle(); }
  void synchronizeStream(const Stream& stream) const override { queue_of(stream).wait("stream"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_use(data.get(), stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new EventPtr(std::make_shared<EventState>());
    EventState::record(event_at(*event), stream);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) EventState::block(event_at(event), stream);
  }
  bool queryEvent(void* event) const override { return !event || event_at(event)->done(); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
#if TESSERA_TORCH_AT_LEAST(2, 4)
  Stream getNewStream(at::Device of, int) const override { return next_stream(index(of)); }
  void synchronizeEvent(void* event) const override {
    if (event) event_at(event)->synchronize();
  }
  void synchronizeDevice(const DeviceIndex) const override { sim::synchronize(); }
#endif

 private:
  static int index(at::Device of) { return of.has_index() ? of.index() : current_device(); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

#if TESSERA_TORCH_AT_LEAST(2, 4)
struct Hooks final : at::PrivateUse1HooksInterface {
#if TESSERA_TORCH_AT_LEAST(2, 7)
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
#endif
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { exchange_device(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return exchange_device(index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current_device() : exchange_device(index);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Device getDeviceFromPtr(void*) const override { return device(current_device()); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generator(index < 0 ? current_device() : index);
  }
};
#endif

}  // namespace

void init(uint64_t seed, int max_delay_us) {
  start_streams(seed, max_delay_us);
  start_memory();
#if TESSERA_TORCH_AT_LEAST(2, 4)
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#endif
}

}  // namespace tessera::sim
