#pragma once

#include "deferred/registry.h"

namespace tessera::deferred {

/// While alive, the tensor's storage has its contents. A deferred one gives its memory back
/// afterwards and stays deferred; others are left alone.
class Contents {
 public:
  explicit Contents(const at::Tensor& tensor);
  ~Contents();
  Contents(const Contents&) = delete;

 private:
  RegionPtr region_;
};

}  // namespace tessera::deferred
