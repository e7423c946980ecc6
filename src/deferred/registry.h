#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "deferred/region.h"
#include "tessera/memory/deferred_init.h"

// [Note: deferred memory] The storages of a scope lie in private mappings. After each operator the
// pages of what it wrote are made inaccessible and, beyond a budget, given back. A later use runs
// the logged operators again: operators that use them within the scope, materialize(), and, for
// code that goes by address, a handler of SIGSEGV. New contents are computed in another mapping and
// moved to the region's address in one step, so that no thread sees a part of them.

namespace tessera::deferred {

using RegionPtr = std::shared_ptr<Region>;

/// The regions of the process. `mutex` guards them.
class Registry {
 public:
  static Registry& instance();

  std::recursive_mutex mutex;
  DeferredStats stats;

  /// Memory for a storage. Without the mutex.
  at::DataPtr allocate(size_t bytes);
  /// The region of the tensor's storage; null if it is in none. Without the mutex.
  RegionPtr find(const at::Tensor& tensor);
  RegionPtr find(const void* address);

  /// Makes the region's memory writable, with its contents unless they will be overwritten.
  void bring(const RegionPtr& region, bool contents = true);
  /// Makes it inaccessible, and gives pages back beyond the budget.
  void put_away(const RegionPtr& region);
  /// The region's next contents are those that `load` writes to new memory.
  void add_load(const RegionPtr& region, std::function<void(const Mapping&)> load);
  /// Gives the pages of a region back, or of all.
  void drop_pages(const RegionPtr& region);
  void drop_pages();
  /// Gives up regions that this thread has made and written by address only.
  void check_unlogged();
  /// From here on it is ordinary memory with its contents.
  void release(const RegionPtr& region);
  /// The same for contents that the log cannot describe: counted and named.
  void give_up(const RegionPtr& region, const std::string& reason);

 private:
  void forget(const RegionPtr& region);
  void take_from_present(const RegionPtr& region);

  std::map<const char*, std::weak_ptr<Region>> regions_;  // by address
  std::list<RegionPtr> present_;                          // the least recently used first
  size_t present_bytes_ = 0;
};

/// New memory with the contents of version `version`. The caller holds the registry's mutex.
std::unique_ptr<Mapping> build(const Region& region, size_t version);

/// Registers a handler of SIGSEGV, in front of the program's, once.
void handle_faults();

}  // namespace tessera::deferred
