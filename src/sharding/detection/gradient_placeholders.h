#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/detection/page.h"
#include "sharding/named_tensor.h"

namespace tessera::sharding {

/// [Note: placeholders of gradients] The gradients are those of the shards, but programs also know
/// the module's parameters: zero_grad() of the module, optimizers and clipping over its parameters.
/// Between backwards, `.grad` of each of these parameters whose shard has a gradient is therefore a
/// placeholder: a tensor of the parameter's shape, with strides of 0, that carries the detection's
/// key. zero_() of it clears the gradient of the shard, a placeholder that the program has removed
/// from `.grad` counts as cleared, and any operator that reads it is an error. Autograd never sees
/// a placeholder: all are removed before a backward accumulates its first gradient.
/// Not between threads: the owner locks.
class GradientPlaceholders : public PageOwner {
 public:
  /// `prefix`: of error messages, "FullyShardedDataParallel: rank 2". `expected`: their advice.
  /// `zero(i)`: the gradient of parameter i becomes zero; called outside of backward.
  GradientPlaceholders(const std::vector<NamedTensor>& parameters, std::string prefix,
                       std::string expected, std::function<void(size_t)> zero);
  ~GradientPlaceholders() override;
  GradientPlaceholders(const GradientPlaceholders&) = delete;

  /// `.grad` of parameter i, which is undefined, becomes its placeholder.
  void show(size_t parameter);
  /// Calls `cleared(i)` for each parameter whose placeholder the program has removed since show().
  template <class Cleared>
  void notice(Cleared&& cleared) {
    for (size_t i = 0; i < entries_.size(); ++i)
      if (take_removed(i)) cleared(i);
  }
  /// True if the program has removed the placeholder of parameter i since show(). True once.
  bool take_removed(size_t parameter);
  /// The error if the program has set `.grad` of parameter i, because the value would not reach the
  /// gradient of the shard; "" if it has not.
  std::string set_by_program(size_t parameter) const;
  /// No `.grad` is a placeholder any more.
  void take_away();
  bool shown(size_t parameter) const { return entries_[parameter].shown; }

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  struct Entry {
    NamedTensor parameter;
    std::unique_ptr<Page> page;  // null before the first show()
    at::Tensor tensor;
    bool shown = false;
  };
  static bool is_in_place(const Entry& entry);

  std::vector<Entry> entries_;
  std::string prefix_, expected_;
  std::function<void(size_t)> zero_;
};

}  // namespace tessera::sharding
