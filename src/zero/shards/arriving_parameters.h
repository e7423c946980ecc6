#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "sharding/detection/page.h"
#include "tessera/process_group.h"

namespace tessera::zero {

/// [Note: gathers in the background] With gather_in_background, step() returns before the updated
/// parameters of the other ranks have arrived. A bucket's parameters are views of a page. While its
/// gather is under way the page has no memory, so nothing can read values that are half old. The
/// first operator that takes one of these parameters, or a view or detached alias of one, waits for
/// the gather.
class ArrivingParameters : public sharding::PageOwner {
 public:
  /// A page whose tensors use `memory`.
  std::unique_ptr<sharding::Page> make_page(const at::Tensor& memory);
  /// `gather`, which writes `memory`, has begun: the page has no memory until it is complete.
  void begin(sharding::Page& page, at::Tensor memory, Work gather);
  /// Blocks until all gathers are complete. BrokenWorldError if one failed; its parameters then
  /// stay without memory. From any thread.
  void wait_all();
  /// As wait_all(), for a destructor: parameters whose gather failed get their memory too.
  void release() noexcept;

  void need(c10::ArrayRef<sharding::PageUse> uses, std::string_view op) override;

 private:
  struct Arriving {
    sharding::Page* page;
    at::Tensor memory;
    Work gather;
  };

  void wait(std::map<size_t, Arriving>::iterator arriving);

  std::mutex mutex_;                     // autograd uses parameters on several threads
  std::map<size_t, Arriving> arriving_;  // by index of the page
  size_t pages_ = 0;
};

}  // namespace tessera::zero
