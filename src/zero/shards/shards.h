#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "sharding/detection/arriving_pages.h"
#include "sharding/gradients/gradient_wire.h"
#include "sharding/named_tensor.h"
#include "tessera/process_group.h"
#include "tessera/zero_redundancy_optimizer.h"
#include "zero/shards/parameter_wire.h"
#include "zero/shards/shard_bucket.h"

namespace tessera::zero {

/// The parameters of all groups, which rank owns which of their elements, and the buckets in which
/// they are stored, reduced and gathered. The same on every rank, except for the owned shards.
class Shards {
 public:
  struct Ways {
    bool one_owner = false;      ///< Rank 0 owns all parameters.
    bool early = false;          ///< [Note: reduction within backward]
    bool in_background = false;  ///< Of gathers: [Note: pages that arrive in the background]
  };

  /// Makes groups of their own for gathers that need one. `gradients` reduces the gradients and
  /// lives longer. `prefix`: of error messages. Collective.
  Shards(ProcessGroup group, const ZeroRedundancyOptimizerOptions& options, Ways ways,
         const sharding::GradientWire& gradients, const std::string& prefix);
  ~Shards();

  /// Adds the parameters of parameter group `index`. UsageError, naming group and parameter, for
  /// parameters that are unsuitable or already in a group. Local.
  void add_group(size_t index, std::vector<sharding::NamedTensor> parameters);
  /// Parameter `i` will not move into a buffer, whatever the options say. Before place_new().
  void keep_storage(size_t i);
  /// Makes buckets for the trainable parameters that add_group() has added since the last call.
  /// Collective: allocates.
  void place_new();
  /// Makes buckets for `thawed`. A parameter with a bucket keeps it and its memory, also while it
  /// is frozen, so that shards and their state stay valid. Collective: allocates.
  void place_thawed(const std::vector<size_t>& thawed);

  /// The memory that a host's ranks share; null without share_parameters.
  sharding::SharedParameters* shared() const { return shared_.get(); }
  bool shares() const { return shared_ && shared_->any(); }

  const std::vector<sharding::NamedTensor>& parameters() const { return parameters_; }
  size_t group_of(size_t parameter) const { return group_of_[parameter]; }
  /// Number of parameters that the last place_new() has seen.
  size_t placed() const { return in_bucket_.size(); }
  /// True if the parameter has a bucket: it has been trainable in some step.
  bool in_bucket(size_t parameter) const { return in_bucket_[parameter]; }
  std::vector<size_t> all_in_buckets() const;
  /// Names of parameters whose requires_grad differs from that of the last note_trainability().
  std::vector<std::string> changed_trainability() const;
  void note_trainability();
  /// Parameters that are trainable and have no bucket, because they were frozen until now.
  std::vector<size_t> thawed() const;
  /// Name of a parameter whose storage was replaced since the buckets were made; "" for none.
  std::string moved_parameter() const;

  std::vector<ShardBucket>& buckets() { return buckets_; }
  const std::vector<ShardBucket>& buckets() const { return buckets_; }
  /// This rank's shards, over all buckets. Empty shards are included.
  std::vector<const sharding::OwnedShard*> owned() const;

  /// Before an update: this rank's shards have their exact values. Local.
  void restore();
  /// Every rank gets every rank's updated shards, and nothing is rounded. Collective.
  void gather_exact();
  /// Null unless parameters travel encoded.
  const ParameterWire* wire() const { return wire_ ? &*wire_ : nullptr; }
  /// Adds the rounding errors of the shards' values to their state slices, as state kWireResidual.
  /// Local.
  void add_residuals(std::vector<StateSlice>& slices) const;
  /// The reverse. A slice may have more elements than the shard. `all`: the others become zero.
  void take_residuals(const std::vector<StateSlice>& slices, bool all);

  /// Every rank gets every rank's updated shards. Ranks with different tags disagree. Without
  /// `paged`, skips the buckets that gather_in_background() gathers. Collective.
  void gather(const std::string& tag = "", bool paged = true);
  /// Begins the gather of bucket `b`, whose shards are updated; gather() waits for it. Collective;
  /// does not block.
  void begin_gather(size_t b, const std::string& tag);
  /// As gather(), but does not block: the first use of a parameter does. In the order in which
  /// forward uses the parameters. Needs Ways::in_background.
  void gather_in_background(const std::string& tag);
  /// Returns when these gathers are complete. Local; blocks.
  void wait_for_gathers() const;
  /// Counts as a write to every trainable parameter: autograd then refuses a backward through
  /// values from before the update. Local.
  void bump_versions();
  void bump_versions(const ShardBucket& bucket);

 private:
  void place(const std::vector<size_t>& subset);
  void place(const std::vector<size_t>& subset, ShardPlan plan);
  ProcessGroup gather_group(size_t b) const;
  Work start_gather(size_t b, const std::string& tag);

  ProcessGroup group_;
  const sharding::GradientWire& gradients_;
  std::optional<ProcessGroup> background_;  // of gathers in it, if `gradients_` are not exact
  std::optional<ParameterWire> wire_;
  std::unique_ptr<sharding::ArrivingPages> arriving_;  // null unless gathers are in the background
  std::unique_ptr<sharding::SharedParameters> shared_;
  ShardPlan plan_;
  bool early_ = false;                             // gradients are reduced within backward
  int64_t cap_bytes_ = 0;                          // option bucket_cap_mb
  std::vector<sharding::NamedTensor> parameters_;  // frozen ones too
  std::vector<size_t> group_of_;
  std::vector<char> in_bucket_, trainable_;
  std::set<size_t> keeps_storage_;
  std::vector<int64_t> load_;              // owned elements by rank
  std::map<size_t, const void*> data_of_;  // address of each placed parameter
  std::vector<ShardBucket> buckets_;
  std::map<size_t, Work> gathers_;  // that have begun, by bucket
};

}  // namespace tessera::zero
