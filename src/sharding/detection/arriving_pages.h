#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "sharding/detection/page.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// [Note: pages that arrive in the background] Pages whose values a collective still writes:
/// with Overlap::background, parameters that ZeroRedundancyOptimizer gathers, and gradients that
/// DistributedDataParallel and FullyShardedDataParallel reduce, with the parameters that are
/// updated from them. Until the collective is complete the page has no memory, so nothing can read
/// a mixture of old and new values. The first operator that takes a tensor of the page, or a view
/// or detached alias of one, waits for the collective.
class ArrivingPages : public PageOwner {
 public:
  /// A page whose tensors use `memory`, which is contiguous.
  std::unique_ptr<Page> make_page(const at::Tensor& memory);
  /// `collective`, which writes `memory`, has begun: the page has no memory until it is complete.
  /// A wait for any page first waits for the collective that began first: its error shows best
  /// which rank made another call.
  void begin(Page& page, at::Tensor memory, Work collective);
  /// Runs `then` when the collective of `page` is complete, in the thread that waits. `then` reads
  /// `page` and writes `followers`, which have memory now and none until then. False, without any
  /// change, if the collective is complete already. From any thread.
  bool follow(const Page& page, const std::vector<Page*>& followers, std::function<void()> then);
  /// Blocks until all collectives are complete and their `then` has run. BrokenWorldError if one
  /// failed; its tensors then stay without memory. From any thread.
  void wait_all();
  /// As wait_all(), for a destructor: pages whose collective failed get their memory too.
  void release() noexcept;

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  struct Held {
    Page* page;
    at::Tensor memory;
  };
  struct Arrival {
    Work collective;
    std::vector<Held> held;
    std::vector<std::function<void()>> then;
  };

  void hold(const std::shared_ptr<Arrival>& arrival, Page& page, at::Tensor memory);
  void wait(const std::shared_ptr<Arrival>& arrival);
  void give_memory(Arrival& arrival);

  std::mutex mutex_;  // autograd uses tensors of pages on several threads
  std::map<size_t, std::shared_ptr<Arrival>> arriving_;  // by index of the page
  std::shared_ptr<Arrival> first_;  // whose collective began first; null if it is complete
  size_t pages_ = 0;
};

}  // namespace tessera::sharding
