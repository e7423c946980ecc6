#pragma once

#include "tessera/join.h"
#include "train/run/run.h"

namespace tessera::train {

/// Goes through the batches of a run's datasets. In a join it is the only Joinable: a rank without
/// data goes through the same steps and evaluations, without a batch.
class RunLoop : private Joinable {
 public:
  explicit RunLoop(Run& run) : run_(run) {}
  /// From start to end. Collective; blocks.
  TrainResult run();

 private:
  ProcessGroup join_group() const override { return run_.context().group; }
  void on_join_iteration(const JoinIteration& iteration) override { run_.on_join(iteration); }
  void shadow_step() override {
    run_.load();
    run_.iteration(std::nullopt);
  }
  void finish_join(int last_active_rank) override {
    run_.models().whole().joinable()->finish_join(last_active_rank);
  }
  void train();

  Run& run_;
};

}  // namespace tessera::train
