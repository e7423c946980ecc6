#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/types.h>

#include "sharding/named_tensor.h"

namespace tessera::sharding {

class Page;

/// The dispatch key of tensors of pages.
inline constexpr auto kDetectionKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// A tensor of a page among the arguments of an operator.
struct PageUse {
  Page* page;
  int64_t offset;                  ///< Offset of the tensor's first element in the page.
  bool written;                    ///< True if the operator changes its elements.
  std::string_view overload = {};  ///< Of the operator; known if the operator writes.
  /// The operator's second argument, if that is a number and this is the first use.
  std::optional<double> number = {};
  const at::Tensor* other = nullptr;  ///< A tensor of no page among the arguments, if there is one.
};

/// Makes sure that pages have memory when an operator uses them.
class PageOwner {
 public:
  virtual ~PageOwner() = default;
  /// Called before operator `op` runs, with all pages of this owner among its arguments. An
  /// exception stops the operator.
  virtual void need(c10::ArrayRef<PageUse> uses, std::string_view op) = 0;
  /// Called when operator `op`, which takes `use`, has thrown `error`. May throw another error.
  virtual void failed(const PageUse& use, std::string_view op, const c10::Error& error) const {}
};

/// A flat tensor whose memory can be attached and detached, and whose use is detected. Views of it,
/// and tensors that autograd saves for backward, share its storage, so they have memory exactly
/// while the page has. Sizes never change. Operators on the page and its views are detected; see
/// detection.h.
class Page {
 public:
  /// `description`: component and tensor, for the error of an operator that uses the tensors after
  /// the page is destroyed. Empty: then the tensors keep the attached memory and are no longer
  /// detected.
  Page(PageOwner* owner, size_t index, int64_t numel, at::TensorOptions options,
       std::string description);
  ~Page();
  Page(const Page&) = delete;

  /// Make views of it under NoDetection.
  const at::Tensor& flat() const { return flat_; }
  size_t index() const { return index_; }
  bool attached() const { return memory_.defined(); }
  /// Undefined while it is not attached.
  const at::Tensor& memory() const { return memory_; }

  /// `memory`: contiguous, of the same numel and dtype. It is kept alive while it is attached.
  void attach(at::Tensor memory);
  void detach();
  /// For a page without description: after it was destroyed, an operator that writes to its tensors
  /// is a UsageError with this message.
  void refuse_writes_afterwards(std::string message) { link_->read_only = std::move(message); }

  /// The page whose storage `tensor` uses; null if there is none or it was destroyed. UsageError if
  /// the page was destroyed together with the memory.
  static Page* of(const at::Tensor& tensor);
  /// UsageError if an operator may not write to `tensor`, whose page was destroyed.
  static void check_orphan_write(const at::Tensor& tensor);
  /// The same for a wrapper that will write to `parameters`, on every rank before any rank does.
  static void check_orphan_writes(const std::vector<NamedTensor>& parameters);
  /// Null after the owner was destroyed.
  PageOwner* owner() const { return link_->owner; }

 private:
  /// Lives as long as the storage, which views can keep alive after the page is destroyed.
  struct Link {
    PageOwner* owner;
    Page* page;
    std::string description;
    at::Tensor memory;      // after the page was destroyed, where its tensors keep it
    std::string read_only;  // the refusal of writes after the page was destroyed; empty: none
  };
  static void release(void* link);
  [[noreturn]] static void refuse_orphan(const Link& link);
  void point_at(void* data);

  std::shared_ptr<Link> link_;
  size_t index_;
  at::Tensor flat_;
  at::Tensor memory_;
};

}  // namespace tessera::sharding
