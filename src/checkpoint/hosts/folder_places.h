#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/process_group.h"

namespace tessera::store {

/// The beginning of the names of files by which ranks find out which of them see the same folder.
inline constexpr const char* kPlacePrefix = ".place-";

/// The sets of ranks that see the same folder: one set if they are on one host or a shared file
/// system. Each set is a place. Its lowest rank, the leader, locks, renames and removes there.
struct FolderPlaces {
  std::vector<int> leaders;        ///< by rank: the leader of its place
  std::vector<std::string> hosts;  ///< by rank: the name of its host

  bool shared() const {
    return std::all_of(leaders.begin(), leaders.end(), [](int leader) { return leader == 0; });
  }
  bool leads(int rank) const { return leaders[rank] == rank; }

  /// A text that marks the parts of one save in several places, which are renamed one by one; "" if
  /// there is one place.
  std::string save_id(const std::string& partial) const;
  /// `text` of rank 0 on the leaders of all places. Collective.
  std::string on_leaders(ProcessGroup group, const std::string& text) const;
};

/// Every rank makes a file in `folder` and looks for the files of the others. The folder must
/// exist. Throws on all ranks if a rank cannot write or list it. Collective.
FolderPlaces find_places(ProcessGroup group, const std::string& folder);

}  // namespace tessera::store
