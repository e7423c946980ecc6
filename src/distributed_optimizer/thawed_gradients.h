#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "sharding/named_tensor.h"
#include "tessera/process_group.h"

namespace tessera::distributed_optimizer {

/// Reduces gradients one by one. One that only some ranks have counts as zero on the others.
/// Collective.
void reduce_gradients(ProcessGroup& group, const std::vector<sharding::NamedTensor>& parameters,
                      double scale);

/// The gradients of parameters that were frozen when the hooks of the others were made, and are
/// trainable now.
class ThawedGradients {
 public:
  /// All parameters of a parameter group that have no hooks.
  struct Group {
    ProcessGroup group;
    std::vector<sharding::NamedTensor> parameters;
  };

  explicit ThawedGradients(std::vector<Group> groups) : groups_(std::move(groups)) {}

  /// After a backward, for those that are trainable now. Collective if there are some.
  void reduce(bool mean, int divisor);
  /// reduce() had this parameter. Local.
  bool has(const std::string& name) const { return reduced_.count(name) > 0; }

 private:
  std::vector<Group> groups_;
  std::set<std::string> reduced_;
};

}  // namespace tessera::distributed_optimizer
