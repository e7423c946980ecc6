#pragma once

#include <string>

namespace tessera::comm {

/// While the scope lives, all collectives that this thread starts have `tag` before their own tag.
/// Ranks whose tags differ disagree about the collective, which is an error on all of them.
class TagScope {
 public:
  explicit TagScope(std::string tag);
  ~TagScope();
  TagScope(const TagScope&) = delete;
  TagScope& operator=(const TagScope&) = delete;

 private:
  std::string before_;
};

}  // namespace tessera::comm
