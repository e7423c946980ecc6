#pragma once

#include <functional>
#include <utility>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::testing {

/// A forked process that runs a function; the destructor kills it.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(20);
    body();
    ::_exit(0);
  }
  int wait() {
    int status = -1;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return status;
  }
  ~Child() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    wait();
  }

 private:
  pid_t pid_;
};

}  // namespace tessera::testing
