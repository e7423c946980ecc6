#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "deferred/region.h"
#include "tessera/memory/deferred_init.h"

// [Note: deferred memory] The storages of a scope lie in private mappings. After each operator the
// pages that it wrote become inaccessible and, beyond a budget, return to the system. A later use
// runs the logged operators again. Such a use is an operator within the scope, materialize(), or an
// access by address, which a handler of SIGSEGV catches. New contents are computed in another
// mapping and moved to the region's address in one step, so that no thread sees only a part.

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
  /// Makes the region inaccessible, and returns pages beyond the budget to the system.
  void put_away(const RegionPtr& region);
  /// `load` writes the region's next contents to new memory.
  void add_load(const RegionPtr& region, std::function<void(const Mapping&)> load);
  /// Returns the pages of one region, or of all, to the system.
  void drop_pages(const RegionPtr& region);
  void drop_pages();
  /// Stops deferring regions that this thread has made and written by address only.
  void check_unlogged();
  /// The region is ordinary memory with its contents from here on.
  void release(const RegionPtr& region);
  /// The same for contents that the log cannot describe; counts and names them.
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
