#include "launch/output/console.h"

#include <cstring>

#include <poll.h>
#include <sys/stat.h>

namespace tessera::launch {
namespace {

bool same_file(int a, int b) {
  struct stat left, right;
  return fstat(a, &left) == 0 && fstat(b, &right) == 0 && left.st_dev == right.st_dev &&
         left.st_ino == right.st_ino;
}

}  // namespace

Console::Console(std::string command)
    : command_(std::move(command)), out_(std::make_shared<Sink>(1, command_)) {
  err_ = same_file(1, 2) ? out_ : std::make_shared<Sink>(2, command_);
}

std::vector<Sink*> Console::sinks() const {
  if (merged()) return {out_.get()};
  return {out_.get(), err_.get()};
}

void Console::write_some(Sink& sink) {
  sink.write_some();
  const int error = sink.take_error();
  // A failure of standard error cannot be reported on standard error.
  if (error == 0 || &sink == err_.get()) return;
  say(command_ + ": stdout: " + std::strerror(error) +
      "; further output of the ranks to it is lost, the ranks keep running");
}

bool Console::flush(int interrupt, std::chrono::milliseconds most) {
  const auto end = Clock::now() + most;
  for (Sink* sink : sinks()) {
    while (sink->pending()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now()).count();
      if (left <= 0) break;
      const bool ready = sink->wants_write();
      pollfd polled[] = {{ready ? sink->fd() : -1, POLLOUT, 0}, {interrupt, POLLIN, 0}};
      poll(polled, 2, static_cast<int>(std::min<int64_t>(left, ready ? 1000 : 20)));
      // A signal ends the wait for a reader that does not read. A writable sink is still written.
      if (polled[0].revents != 0) write_some(*sink);
      else if (polled[1].revents != 0) return false;
    }
  }
  return true;
}

}  // namespace tessera::launch
