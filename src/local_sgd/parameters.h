#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"

namespace tessera::local_sgd {

/// The shards as one flat buffer, of which each rank of `replicas` has an equal part.
class Parameters {
 public:
  Parameters(std::vector<ParameterShard> shards, ProcessGroup replicas,
             std::function<void()> publish, std::function<void()> prepare);

  /// Call after the checks. Local.
  void measure();
  /// UsageError for a shard that cannot be synchronised. Local.
  void check(int rank) const;
  /// Lines of text that must be equal on all ranks. Local.
  std::vector<std::string> contract() const;
  /// A message if a shard is not as at construction; empty if all are. Local.
  std::string changed(int rank) const;

  /// Waits until nothing else uses the shards. Collective over the inner group.
  void prepare() const {
    if (prepare_) prepare_();
  }
  /// The values of this rank's part, a copy. Local.
  at::Tensor part() const;
  /// Gives all shards of all replicas new values; `part`: this rank's part. Collective.
  void write(const at::Tensor& part);
  /// The elements of part(), in its order. Local.
  std::vector<ElementRange> ranges() const;
  int64_t numel() const { return counts_[static_cast<size_t>(replicas_.rank())]; }

 private:
  struct Storage {
    const void* data;
    int64_t numel;
    at::ScalarType dtype;
    bool used_elsewhere;  // by a module or an optimizer
  };

  static Storage storage_of(const at::Tensor& tensor);
  int64_t begin() const;

  std::vector<ParameterShard> shards_;
  std::vector<Storage> storages_;
  ProcessGroup replicas_;
  std::function<void()> publish_, prepare_;
  std::vector<int64_t> counts_;
  at::TensorOptions options_;
};

}  // namespace tessera::local_sgd
