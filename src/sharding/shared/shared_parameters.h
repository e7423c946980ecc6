#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "sharding/detection/page.h"
#include "sharding/named_tensor.h"
#include "tessera/process_group.h"

namespace tessera::sharding {

/// [Note: one copy a host] With share_parameters all ranks of a host map the same parameters, and
/// one rank writes each element. Two barriers separate reads from writes. Before the update every
/// rank has finished its forward and backward passes: the reduction of gradients is such a barrier,
/// or a separate barrier is made. After the update comes the gather, an all_gather() of common
/// memory: within a host only a barrier.
///
/// A write by other code would change the values of every rank. The parameters are therefore views
/// of pages, and operators that write to them are errors. The library itself writes to the memory
/// behind the pages.
class SharedParameters : public PageOwner {
 public:
  /// `prefix`: of error messages, "ZeroRedundancyOptimizer: rank 2". `expected`: the call that they
  /// recommend. `from_rank0`: every host gets rank 0's values, else its first rank's.
  SharedParameters(ProcessGroup group, std::string prefix, std::string expected, bool from_rank0);
  SharedParameters(const SharedParameters&) = delete;

  /// Zero-filled memory for place(); undefined where each host has one rank, whose parameters then
  /// stay as they are. UsageError on every rank where the ranks of a host share no memory.
  /// Collective.
  at::Tensor allocate(int64_t numel, at::TensorOptions options);
  /// Moves `parameters[members[m]]` to element offsets[m] of `memory`. Deferred parameters are
  /// computed once a host. Collective.
  void place(const at::Tensor& memory, const std::vector<NamedTensor>& parameters,
             const std::vector<size_t>& members, const std::vector<int64_t>& offsets);
  /// Allocates memory for `members`, of any dtypes, and moves them there. Collective.
  void place_whole(const std::vector<NamedTensor>& parameters, const std::vector<size_t>& members);

  /// Whether `parameter` is in the shared memory.
  bool holds(const at::Tensor& parameter) const;
  /// Gives a parameter in the shared memory a copy of this rank's own. Local.
  void take_out(at::Tensor parameter);

  /// True if anything was placed.
  bool any() const { return bytes_ > 0; }
  /// This rank's equal part of the bytes of the host's copy.
  int64_t own_bytes() const;

  /// Returns when all ranks have called it: no rank reads any more. Collective.
  void wait_for_readers();
  /// Waits for the call of all ranks, then runs `write` on the first rank of each host, or on every
  /// rank if nothing is shared. UsageError on every rank if it throws. Collective.
  void write(const std::function<void()>& write);

  void need(c10::ArrayRef<PageUse> uses, std::string_view op) override;

 private:
  /// The beginning of a parameter in its page.
  struct Place {
    int64_t offset, numel;
    std::string name;
  };
  bool first_of_host() const;
  void publish(const at::Tensor& memory, const std::string& names);

  ProcessGroup group_;
  std::string prefix_, expected_;
  bool from_rank0_;
  std::vector<std::vector<Place>> places_;  // by index of the page, ascending
  std::vector<std::unique_ptr<Page>> pages_;
  int64_t bytes_ = 0;
  std::atomic<int> writing_{0};
};

}  // namespace tessera::sharding
