#pragma once

#include <functional>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "sharding/detection/page.h"

namespace tessera::sharding {

/// [Note: norms of one rank] torch::nn::utils::clip_grad_norm_ takes the norm of each gradient and
/// multiplies the gradients by a tensor that follows from all norms. If a rank's `.grad`s are those
/// of its own shards, or of its own data only, every rank would scale by a different number. These
/// `.grad`s are therefore views of pages of this owner. A norm or a sum of powers of every `.grad`
/// and then mul_ by a tensor is an error. Other clipping reads every gradient in some way, such as
/// g * g or dot(), and then multiplies or divides all of them, in place or not, by a number. Not
/// every such number depends on the gradients. So the numbers are kept, also those in CPU tensors,
/// and a difference between ranks is an error too. All other operators are allowed, such as norms
/// for a log, and an optimizer that takes a norm and updates, parameter by parameter.
class LocalNorms : public PageOwner {
 public:
  /// A gradient: the index of its page and its first element there.
  using Gradient = std::pair<size_t, int64_t>;

  /// `refuse`: throws the error. `all`: the gradients that are defined at present.
  LocalNorms(std::function<void()> refuse, std::function<std::set<Gradient>()> all)
      : refuse_(std::move(refuse)), all_(std::move(all)) {}
  LocalNorms(const LocalNorms&) = delete;

  /// Forgets the norms: the gradients have changed.
  void reset();
  /// One bit for each of kBits. Since the last call, ranks that read the gradients and then scaled
  /// by different numbers have different bits.
  std::vector<char> take_scales();
  static constexpr size_t kBits = 32;

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  bool clips(c10::ArrayRef<PageUse> uses, std::string_view op);

  std::function<void()> refuse_;
  std::function<std::set<Gradient>()> all_;
  std::mutex mutex_;  // autograd adds to gradients on several threads
  std::set<Gradient> read_;
  Gradient last_ = {};
  bool by_norms_ = false;    // all in read_ by operators of norms
  bool scaling_ = false;     // all gradients were read, and then only scaled
  std::set<double> scales_;  // by which gradients were multiplied then
};

}  // namespace tessera::sharding
