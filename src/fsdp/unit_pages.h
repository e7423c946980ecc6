#pragma once

#include "fsdp/residency.h"

namespace tessera::fsdp {

/// Makes the module's parameters views of pages, and the pools of slots. From then on they have no
/// memory of their own.
class UnitPages {
 public:
  /// Collective.
  UnitPages(ShardedModel& model, Residency& residency);

  /// Makes the page of `flat` for its present compute dtype, and the pool of its slots.
  void make(FlatParameter& flat);
  /// Makes the pool of the slots of the gradients of `flat`.
  void make_gradients(FlatParameter& flat);
  /// Makes the members of `flat` views of its page again.
  void restore(const FlatParameter& flat);
  /// A tensor without memory of the parameter's shape and strides.
  const at::Tensor& shape(size_t parameter) const { return shapes_[parameter]; }

 private:
  SlotPool* pool(const FlatParameter& flat, at::TensorOptions (FlatParameter::*options_of)() const,
                 bool for_gradients);
  void watch_shards(FlatParameter& flat);

  ShardedModel& model_;
  Residency& residency_;
  struct Pool {
    at::TensorOptions options;
    bool root, gradients;
    std::unique_ptr<SlotPool> slots;
  };
  std::vector<Pool> pools_;
  std::vector<at::Tensor> shapes_;
};

}  // namespace tessera::fsdp
