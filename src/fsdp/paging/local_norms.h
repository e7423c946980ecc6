#pragma once

#include <functional>
#include <set>
#include <string>
#include <utility>

#include "fsdp/paging/page.h"

namespace tessera::fsdp {

/// [Note: norms of shards] torch::nn::utils::clip_grad_norm_ takes the norm of each gradient and
/// multiplies the gradients by a tensor that follows from all norms. On shards the norms are those
/// of one rank's elements, so every rank would scale by another number. Where a rank holds only
/// some of the elements, the gradients of the shards are therefore views of pages of this owner: a
/// norm of every one of them and then mul_ by a tensor is an error. All other operators are
/// allowed, such as norms for a log, and an optimizer that takes a norm and updates, parameter by
/// parameter.
class LocalNorms : public PageOwner {
 public:
  /// A gradient: the index of its page and its first element there.
  using Gradient = std::pair<size_t, int64_t>;

  /// `prefix`: of error messages. `all`: the gradients that are defined at present.
  LocalNorms(std::string prefix, std::function<std::set<Gradient>()> all)
      : prefix_(std::move(prefix)), all_(std::move(all)) {}
  LocalNorms(const LocalNorms&) = delete;

  /// Forgets the norms: the gradients have changed.
  void reset() { normed_.clear(); }

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  std::string prefix_;
  std::function<std::set<Gradient>()> all_;
  std::set<Gradient> normed_;
  Gradient last_ = {};
};

}  // namespace tessera::fsdp
