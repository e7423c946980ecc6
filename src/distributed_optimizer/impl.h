#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "distributed_optimizer/packing.h"
#include "sharding/gradients/reducer.h"
#include "tessera/distributed_optimizer.h"

namespace tessera {

/// Files: construction.cpp (what is where, packs), reduction.cpp (a backward).
class DistributedOptimizer::Impl {
 public:
  static constexpr const char* kName = "DistributedOptimizer";

  Impl(std::shared_ptr<torch::optim::Optimizer> optimizer, const NamedParameters& names,
       const std::vector<std::optional<ProcessGroup>>& dist_groups, Options options);

  /// One synchronised parameter group: a lane of the reducer.
  struct Lane {
    ProcessGroup group;
    size_t parameter_group;
    std::vector<at::Tensor> tensors;  ///< Frozen ones too: what bcast_param() gives.
    std::vector<size_t> members;      ///< Indices into trainable_.
    std::vector<size_t> record;       ///< This rank's order of arrival when the packs were made.
    distributed_optimizer::Packs packs;
    bool packed = false;
    bool repack_due = false;
  };

  // construction.cpp
  void add_lane(size_t index, ProcessGroup group, const NamedParameters& names);
  void check_options();
  void check_contract();
  void make_reducer();
  std::vector<sharding::Bucket> make_buckets();
  void repack();
  void check_trainability() const;
  std::string prefix() const;
  double scale(const Lane& lane) const;

  // reduction.cpp
  void send(size_t bucket);
  void finish();
  void drain();
  bool follows_record(const Lane& lane, const sharding::Bucket& bucket) const;
  at::Tensor start_agreement(size_t lane);
  void settle(size_t lane, const at::Tensor& counts);
  void note_order(Lane& lane, size_t index);
  void broadcast(int root);

  std::shared_ptr<torch::optim::Optimizer> optimizer_;
  NamedParameters names_;
  Options options_;
  bool mean_ = false;
  std::vector<Lane> lanes_;
  std::vector<sharding::NamedTensor> trainable_;
  std::vector<size_t> lane_of_;     ///< Of each of trainable_.
  std::vector<at::Tensor> frozen_;  ///< Synchronised, but not trainable at construction.
  std::unique_ptr<sharding::Reducer> reducer_;

  std::vector<Work> sent_;
  std::vector<char> followed_;  ///< Of each bucket, in this backward: sent as recorded.
  uint64_t reductions_ = 0;
  int64_t steps_ = 0;
  bool shadowing_ = false;
  int divisor_ = 0;    ///< In a join; 0: the size of the group.
  int publisher_ = 0;  ///< Who publishes packs.
};

}  // namespace tessera
