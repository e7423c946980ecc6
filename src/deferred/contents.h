#pragma once

#include "deferred/registry.h"

namespace tessera::deferred {

/// While the object lives, the tensor's storage has its contents. A deferred storage frees its
/// memory afterwards and stays deferred; other storages are not changed.
class Contents {
 public:
  explicit Contents(const at::Tensor& tensor);
  ~Contents();
  Contents(const Contents&) = delete;

 private:
  RegionPtr region_;
};

}  // namespace tessera::deferred
