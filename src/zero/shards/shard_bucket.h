#pragma once

#include <memory>
#include <vector>

#include <torch/types.h>

#include "sharding/bucket.h"
#include "sharding/detection/page.h"
#include "sharding/named_tensor.h"
#include "sharding/owned_shard.h"
#include "sharding/shared/shared_parameters.h"
#include "tessera/optim/partition.h"
#include "tessera/process_group.h"

namespace tessera::zero {

using sharding::OwnedShard;

/// The name in messages and contracts.
inline constexpr const char* kName = "ZeroRedundancyOptimizer";

/// Parameters of one dtype and device that are reduced, updated and gathered together.
struct ShardBucket {
  std::vector<size_t> members;  ///< Indices into the list of parameters, in the layout's order.
  sharding::Layout layout;
  at::Tensor parameters;  ///< Flat buffer; undefined if parameters keep their own storage.
  /// With gathers in the background, what the parameters are views of; it uses the flat buffer.
  std::unique_ptr<sharding::Page> page;
  sharding::Bucket gradients;  ///< This rank's own gradients; empty without reduce_gradients.
  std::vector<OwnedShard> shards;
  std::string names;  ///< Of its first and last parameter, for the tags of its collectives.
};

struct ShardPlan {
  Partition partition = Partition::flat;
  bool as_bucket_view = true;
  bool with_gradients = true;
  bool one_owner = false;       ///< Rank 0 owns all parameters.
  bool lean_gradients = false;  ///< Buckets of gradients have no memory until they are written.
  /// Puts the parameters into memory that a host's ranks share. Null: they are not shared.
  sharding::SharedParameters* shared = nullptr;
  int64_t cap_bytes = 0;  ///< Size of a bucket; 0: one bucket for each dtype and device.
};

/// Buckets for `subset` of `parameters`. `load` counts the elements of each rank over several
/// calls. Collective: allocates.
std::vector<ShardBucket> make_shard_buckets(const std::vector<sharding::NamedTensor>& parameters,
                                            const std::vector<size_t>& subset,
                                            const std::vector<size_t>& group_of,
                                            const ShardPlan& plan, std::vector<int64_t>& load,
                                            ProcessGroup& group);

/// Makes the parameters and shards of `bucket` views of `page`, which uses bucket.parameters.
/// `whole`: shards are whole parameters. Local.
void put_on_page(ShardBucket& bucket, const std::vector<sharding::NamedTensor>& parameters,
                 std::unique_ptr<sharding::Page> page, bool whole);

/// The tag of the bucket's gather; `own_tag` may be empty.
std::string gather_tag(const ShardBucket& bucket, const std::string& own_tag);

/// Every rank receives every rank's updated segment. Ranks with different tags disagree.
/// Collective.
void gather_parameters(ShardBucket& bucket, const std::vector<sharding::NamedTensor>& parameters,
                       ProcessGroup group, const std::string& tag = "");

}  // namespace tessera::zero
