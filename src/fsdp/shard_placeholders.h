#pragma once

#include <atomic>
#include <memory>

#include <c10/util/ScopeExit.h>

#include "fsdp/gradient_buffers.h"
#include "fsdp/reductions.h"
#include "sharding/detection/gradient_placeholders.h"

namespace tessera::fsdp {

/// The program's accesses to `.grad` of the module's parameters, and of the shards.
///
/// [Note: access to gradients of shards] Optimizers and programs call grad() and mutable_grad() of
/// the shards, which are virtual functions of a tensor's autograd metadata. These take earlier
/// changes of `.grad` of the module's parameters into account, without an operator or a call of
/// Tessera: see [Note: placeholders of gradients].
/// Not between threads, except for the shards: the owner locks the model's mutex.
class ShardPlaceholders {
 public:
  ShardPlaceholders(ShardedModel& model, GradientBuffers& buffers, Reductions& reductions);
  ~ShardPlaceholders() { *self_ = nullptr; }
  ShardPlaceholders(const ShardPlaceholders&) = delete;

  /// UsageError on all ranks if the program has set `.grad` of a parameter of the module.
  void refuse_set();
  /// The same, and clears the gradients whose placeholders the program has removed. Outside of
  /// backward.
  void notice();
  void take_away() { placeholders_.take_away(); }
  void begin_backward();
  void end_backward();
  /// While the result exists, the program must not take the gradients of the shards.
  auto own_access() {
    return c10::make_scope_exit([this, before = busy_.exchange(true)] { busy_ = before; });
  }

 private:
  class Meta;

  void zero(size_t parameter);
  void clear(size_t parameter);
  void accessed(size_t parameter, bool to_write, bool missing);

  ShardedModel& model_;
  GradientBuffers& buffers_;
  Reductions& reductions_;
  sharding::GradientPlaceholders placeholders_;
  std::atomic<bool> busy_ = false;
  std::shared_ptr<ShardPlaceholders*> self_;  // of the shards, which may live longer
};

}  // namespace tessera::fsdp
