#pragma once

#include <csignal>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::testing {

/// A process that runs `body` and sends the returned text, or the error text, over a pipe.
class Child {
 public:
  explicit Child(const std::function<std::string()>& body) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    pid_ = ::fork();
    if (pid_ == 0) {
      std::string text;
      try {
        at::set_num_threads(1);  // the thread pool of libtorch does not survive a fork
        text = body();
      } catch (const std::exception& error) {
        text = error.what();
      }
      text += '\n';
      if (::write(ends[1], text.data(), text.size()) < 0) ::_exit(1);
      ::pause();
    }
    ::close(ends[1]);
    out_ = ends[0];
  }
  ~Child() {
    kill();
    ::close(out_);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  std::string line() const {
    std::string text;
    for (char c = 0; ::read(out_, &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int out_ = -1;
};

}  // namespace tessera::testing
