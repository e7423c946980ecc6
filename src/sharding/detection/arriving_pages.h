#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "sharding/detection/page.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// [Note: pages that arrive in the background] Pages whose values a collective still writes:
/// parameters that ZeroRedundancyOptimizer gathers with gather_in_background, and gradients that
/// DistributedDataParallel reduces with reduce_in_background. Until the collective is complete the
/// page has no memory, so nothing can read values that are half old. The first operator that takes
/// a tensor of the page, or a view or detached alias of one, waits for the collective.
class ArrivingPages : public PageOwner {
 public:
  /// A page whose tensors use `memory`.
  std::unique_ptr<Page> make_page(const at::Tensor& memory);
  /// `collective`, which writes `memory`, has begun: the page has no memory until it is complete.
  /// Whatever is needed first, the collective that has begun first is waited for before: it tells
  /// best which rank called another one.
  void begin(Page& page, at::Tensor memory, Work collective);
  /// Blocks until all collectives are complete. BrokenWorldError if one failed; its tensors then
  /// stay without memory. From any thread.
  void wait_all();
  /// As wait_all(), for a destructor: pages whose collective failed get their memory too.
  void release() noexcept;

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  struct Arriving {
    Page* page;
    at::Tensor memory;
    Work collective;
  };

  void wait(std::map<size_t, Arriving>::iterator arriving);

  std::mutex mutex_;                     // autograd uses tensors of pages on several threads
  std::map<size_t, Arriving> arriving_;  // by index of the page
  size_t first_ = 0;                     // of arriving_, the page whose collective began first
  size_t pages_ = 0;
};

}  // namespace tessera::sharding
