#pragma once

#include <memory>
#include <string>
#include <string_view>

#include <torch/torch.h>

#include "tessera/fully_sharded_data_parallel.h"

namespace tessera::fsdp {

class Page;

/// What tensors of pages carry.
inline constexpr auto kDetectionKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// A tensor of a page that an operator takes.
struct PageUse {
  Page* page;
  int64_t offset;  ///< Of its first element, in the page.
  bool written;
};

/// Who answers when an operator takes tensors of pages.
class PageOwner {
 public:
  virtual ~PageOwner() = default;
  /// Called before operator `op` runs, with all of the owner's pages that it takes. Throws to stop
  /// it.
  virtual void need(c10::ArrayRef<PageUse> uses, std::string_view op) = 0;
};

/// A flat tensor whose memory comes and goes under it: views of it, and tensors saved for backward,
/// share its storage and so come and go with it. Sizes stay. Operators on it and on its views are
/// noticed; see detection.cpp.
class Page {
 public:
  /// `what`: what its tensors are called when they are used after the page is gone.
  Page(PageOwner* owner, size_t index, int64_t numel, at::TensorOptions options,
       ParameterDetection detection, std::string what);
  ~Page();
  Page(const Page&) = delete;

  /// Views of it are made under a NoDetection guard.
  const at::Tensor& flat() const { return flat_; }
  size_t index() const { return index_; }
  bool attached() const { return memory_.defined(); }

  /// `memory`: of the same numel and dtype, contiguous; kept alive while it is attached.
  void attach(at::Tensor memory);
  void detach();

  /// The page whose storage `tensor` has; null for others. UsageError when that page is gone.
  static Page* of(const at::Tensor& tensor);
  /// Null after the owner is gone.
  PageOwner* owner() const { return link_->owner; }

 private:
  /// Outlives the page in storages that views keep alive.
  struct Link {
    PageOwner* owner;
    Page* page;
    std::string what;
  };
  static void release(void* link);
  [[noreturn]] static void refuse_orphan(const Link& link);
  void point_at(void* data);

  std::shared_ptr<Link> link_;
  size_t index_;
  at::Tensor flat_;
  at::Tensor memory_;
};

/// While alive on this thread, operators on pages go unnoticed: for our own use of them.
class NoDetection {
 public:
  NoDetection() : guard_(kDetectionKey) {}
  NoDetection(const NoDetection&) = delete;

  static bool here() { return c10::impl::tls_is_dispatch_key_excluded(kDetectionKey); }

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

/// Tells the owners of `uses` (at least one) that operator `op` is about to run.
void tell_owners(c10::ArrayRef<PageUse> uses, std::string_view op);

/// The operators of which most models are made go without the boxing of a fallback, which costs
/// more than the rest of the detection. Once.
void register_frequent_operators();

/// Makes sure that operators on pages are noticed, from now on; returns the mechanism. UsageError
/// when `wanted` is the key and it is taken.
ParameterDetection start_detection(ParameterDetection wanted);
/// Undoes one start_detection().
void stop_detection(ParameterDetection mechanism);

}  // namespace tessera::fsdp
