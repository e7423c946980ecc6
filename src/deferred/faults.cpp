#include <cerrno>
#include <csignal>
#include <cstdio>
#include <exception>

#include "deferred/registry.h"

namespace tessera::deferred {
namespace {

struct sigaction& action_before() {
  static struct sigaction action {};
  return action;
}

/// True if the access that failed may be tried again.
bool provide(void* address) {
  auto& registry = Registry::instance();
  const auto region = registry.find(address);
  if (!region) return false;
  const std::lock_guard lock(registry.mutex);
  // Another thread may have provided the memory in between; give_up() then does nothing.
  if (region->state != Region::State::fresh) registry.give_up(region, "it is used by address");
  return true;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  try {
    if (provide(info->si_addr)) {
      errno = error;
      return;
    }
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "tessera: deferred_init: values that are used by address: %s\n",
                 problem.what());
  }
  auto& before = action_before();
  if ((before.sa_flags & SA_SIGINFO) != 0) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    return before.sa_handler(signal);
  sigaction(SIGSEGV, &before, nullptr);  // the access fails again, without this handler
}

}  // namespace

void handle_faults() {
  static const bool done = [] {
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &action_before());
    return true;
  }();
  static_cast<void>(done);
}

}  // namespace tessera::deferred
