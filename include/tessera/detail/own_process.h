#pragma once

#include <unistd.h>

#pragma GCC visibility push(default)
namespace tessera::detail {

/// The process that made an object. A child made by fork() inherits the object, but not its
/// threads, and the files, folders and peers belong to the parent. Destructors that end threads,
/// remove files or tell peers do nothing in such a child.
class OwnProcess {
 public:
  bool is_this() const { return pid_ == ::getpid(); }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = ::getpid();
};

}  // namespace tessera::detail
#pragma GCC visibility pop
