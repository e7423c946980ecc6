#pragma once

#include <functional>
#include <vector>

#include "tessera/local_sgd.h"

namespace tessera {

/// The joinables of the inner group in a join over all groups.
class LocalSgd::InnerJoin {
 public:
  InnerJoin(ProcessGroup world, std::vector<std::reference_wrapper<Joinable>> inner,
            std::function<void()> shadow);

  const ProcessGroup& world() const { return world_; }
  void on_join_iteration(const JoinIteration& iteration);
  /// One step without data, if another rank of the inner group has some. Collective there.
  void shadow_step();
  void finish_join();

 private:
  ProcessGroup world_;
  std::vector<std::reference_wrapper<Joinable>> inner_;
  std::function<void()> shadow_;
  std::vector<size_t> members_;  // the inner group's ranks in world_
  bool active_ = true;           // some rank of the inner group has data
  int last_active_ = 0;          // the lowest inner rank with data in the last such iteration
};

}  // namespace tessera
