#pragma once

#include <string>

namespace tessera::comm {

/// Who meets at a store, for messages: the ranks of a world, or the launchers of its hosts.
struct Caller {
  std::string component = "init_process_group";
  std::string noun = "rank";  ///< A number follows it.
};

}  // namespace tessera::comm
