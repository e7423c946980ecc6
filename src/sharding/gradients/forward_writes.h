#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// Finds parameters to which a forward writes other values on each rank, so that the ranks drift
/// apart, as Embedding does with max_norm. Without writes it reads only the versions of tensors.
class ForwardWrites {
 public:
  explicit ForwardWrites(std::vector<NamedTensor> parameters = {})
      : parameters_(std::move(parameters)) {}

  /// Compares the values that are written from now on. No effect between this and compare(), but
  /// the first call that does not evaluate begins anew: an evaluation may be one of this rank
  /// alone, and so may the writes around it. Local.
  void begin(bool evaluates = false);
  /// UsageError on every rank if the ranks differ in a parameter that was written since
  /// begin(). Collective if this rank has written one; if others have not, all get an error, too.
  void compare(const std::string& component, ProcessGroup group);
  /// True if this rank has written parameter i since begin(). Local.
  bool written(size_t parameter) const;
  /// compare() of one parameter, whether or not this rank has written it. Collective.
  void compare(const std::string& component, ProcessGroup group, size_t parameter) const;
  /// begin() again. Local.
  void restart() {
    versions_.clear();
    begin();
  }
  /// While some rank of a join has no data, nothing is compared: it runs no forward. Local.
  void pause(bool paused) { paused_ = paused; }

 private:
  std::vector<NamedTensor> parameters_;
  std::vector<int64_t> versions_;  // empty after compare()
  bool evaluates_ = false;         // the last begin() was that of an evaluation
  bool paused_ = false;
};

}  // namespace tessera::sharding
