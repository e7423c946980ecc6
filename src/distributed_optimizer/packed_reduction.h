#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "distributed_optimizer/packing.h"
#include "distributed_optimizer/thawed_gradients.h"
#include "sharding/gradients/forward_writes.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/gradients/reducer.h"
#include "tessera/join.h"
#include "tessera/process_group.h"

namespace tessera::distributed_optimizer {

struct PackedReductionOptions {
  bool mean = true;            ///< Mean over the ranks, else sum.
  bool pack = false;           ///< By order of arrival. Off: buckets in the parameters' order.
  int64_t pack_threshold = 1;  ///< A pack is closed when it has more bytes than this.
  /// Values that must be the same on all ranks in a backward: the number of steps before it, and
  /// the options (lr, …) of this parameter group of the optimizer.
  std::function<std::string(size_t parameter_group)> describe_step;
  WireFormat wire = WireFormat::float32;  ///< Of gradients between hosts.
  bool overlap = true;                    ///< Packs are reduced within backward, not at its end.
  /// Ranks that have written other values of a parameter since the last step are an error.
  bool compare_writes = true;
};

/// All-reduces the gradients of several parameter groups during backward, each group over its own
/// process group and in packs of its own. See [Note: packs that do not count].
class PackedReduction : private sharding::ReductionPolicy {
 public:
  /// One parameter group. The groups of one process group become one lane of the Reducer.
  struct Group {
    ProcessGroup group;
    size_t parameter_group;       ///< Its index in the optimizer.
    std::vector<size_t> members;  ///< Consecutive indices into the parameters. At least one.
  };

  /// `parameters` are trainable, and each is a member of one of `groups`. `thawed`: of those that
  /// are not; must outlive this. Local.
  PackedReduction(std::vector<sharding::NamedTensor> parameters, std::vector<Group> groups,
                  ThawedGradients& thawed, PackedReductionOptions options);
  PackedReduction(const PackedReduction&) = delete;

  /// The reducer of all lanes.
  sharding::Reducer& reducer() { return *reducer_; }

  /// Scopes in which backward passes accumulate gradients locally and start no collective.
  void hold_sync(int change) { reducer_->hold_sync(change); }
  bool sync() const { return reducer_->sync(); }

  /// loss.backward(), and the reduction of all gradients even if `loss` depends on no parameter.
  /// Collective over each group unless sync is off.
  void backward(const at::Tensor& loss);
  /// The collectives of another rank's backward; this rank's gradients count as zero. Collective.
  void shadow_backward();

  /// Forms new packs for the groups that need them, from the order in which the gradients arrived
  /// on rank 0 in the last backward. Between backward passes. Collective over those groups.
  void repack();

  /// See sharding::GradientWire. If they were `used`, the parameters have changed: later writes are
  /// compared at the end of backward, see sharding::ForwardWrites. Between backward passes.
  void end_step(bool used) {
    for (auto& lane : lanes_) lane.wire->end_step(used);
    if (used) writes_.restart();
  }
  void rescale_wire(double factor);

  /// During a join, the first active rank publishes the packs instead of rank 0.
  void set_join(const JoinIteration& iteration);

  /// The packs of a parameter group of the optimizer, as names; empty for a group that is not
  /// reduced.
  std::vector<std::vector<std::string>> pack_names(size_t parameter_group) const;

 private:
  struct Lane : Group {
    Packs packs;
    std::vector<size_t> record;  // this rank's order of arrival from which the packs were made
    bool packed = false;         // `packs` were made by pack_by_arrival()
    bool repack_due = false;
    /// The first lane with the same process group. Collectives of one group need one order, also
    /// when a gradient is missing on some ranks.
    size_t channel = 0;
    std::shared_ptr<sharding::GradientWire> wire = nullptr;  // lanes of one channel share it
  };

  void make_reducer();
  void notice_cleared();
  std::vector<sharding::Bucket> make_buckets();
  std::vector<std::pair<size_t, size_t>> order_of_packs() const;
  size_t lane_of(const sharding::Bucket& bucket) const;
  double scale(const Lane& lane) const;

  void start(size_t index) override;
  void reduce_bucket(size_t index);
  void finish() override;
  void abandon() override;
  void finished() override;

  bool follows_record(size_t lane, const sharding::Bucket& bucket) const;
  at::Tensor use_and_deviations(size_t lane) const;
  void settle(size_t lane, const at::Tensor& counts);
  void record_arrival(size_t lane);
  void repack(Lane& lane, const std::vector<PackItem>& items);

  PackedReductionOptions options_;
  std::vector<sharding::NamedTensor> parameters_;
  ThawedGradients& thawed_;
  std::vector<Lane> lanes_;
  std::vector<size_t> lane_of_;   // of each parameter
  std::vector<size_t> complete_;  // buckets, without overlap
  std::vector<Work> started_;
  std::vector<char> followed_;  // of each bucket: in this backward it was sent as recorded
  uint64_t reductions_ = 0;     // backward passes that were reduced
  bool shadowing_ = false;
  sharding::ForwardWrites writes_;
  int divisor_ = 0;    // 0: the size of the lane's group
  int publisher_ = 0;  // the rank whose order of arrival determines the packs
  std::unique_ptr<sharding::Reducer> reducer_;
};

}  // namespace tessera::distributed_optimizer
