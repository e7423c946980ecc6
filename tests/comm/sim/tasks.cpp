#include "sim/tasks.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <random>
#include <utility>

#include <dlfcn.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace tessera::sim {
namespace {

constexpr size_t kStackBytes = 256 << 10;

Tasks* tasks = nullptr;  // while one of its tasks runs

int really_poll(pollfd* entries, nfds_t count, int timeout) {
  const timespec time{timeout / 1000, timeout % 1000 * 1'000'000L};
  return ::ppoll(entries, count, timeout < 0 ? nullptr : &time, nullptr);
}

template <class Function>
Function* of_the_system(Function*, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

Tasks::Task* Tasks::add(std::function<void()> body) {
  auto& task = tasks_.emplace_back();
  task.body = std::move(body);
  task.stack.resize(kStackBytes);
  task.until = now;
  ::getcontext(&task.context);
  task.context.uc_stack = {task.stack.data(), 0, task.stack.size()};
  ::makecontext(&task.context, &Tasks::begin, 0);
#ifdef __SANITIZE_THREAD__
  task.fiber = __tsan_create_fiber(0);
#endif
  return &task;
}

void Tasks::begin() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  tasks->running_->body();
  tasks->running_->ended = true;
  tasks->leave(true);
}

void Tasks::run(Task& task) {
  running_ = &task;
  tasks = this;
#ifdef __SANITIZE_THREAD__
  void* const own = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(task.fiber, 0);
#endif
#ifdef __SANITIZE_ADDRESS__
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, task.stack.data(), task.stack.size());
#endif
  ::swapcontext(&main_, &task.context);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
#ifdef __SANITIZE_THREAD__
  __tsan_switch_to_fiber(own, 0);
  if (task.ended) __tsan_destroy_fiber(task.fiber);
#endif
  tasks = nullptr;
  running_ = nullptr;
}

void Tasks::leave(bool for_ever) {
  auto& context = running_->context;
#ifdef __SANITIZE_ADDRESS__
  static pthread_attr_t attributes;
  static void* bottom = nullptr;
  static size_t size = 0;
  if (!bottom) {
    ::pthread_getattr_np(::pthread_self(), &attributes);
    ::pthread_attr_getstack(&attributes, &bottom, &size);
  }
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake, bottom, size);
#endif
  ::swapcontext(&context, &main_);
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

bool Tasks::can_run(Task& task) {
  if (task.ended || task.paused_until > now) return false;
  if (task.joins) return task.joins->ended;
  task.ready = task.count > 0 ? really_poll(task.entries, task.count, 0) : 0;
  return task.ready > 0 || task.until <= now;
}

bool Tasks::turn() {
  const auto count = static_cast<int64_t>(tasks_.size());
  auto at = std::next(tasks_.begin(), count > 0 ? dice_.below(count) : 0);
  for (int64_t i = 0; i < count; ++i, ++at) {
    if (at == tasks_.end()) at = tasks_.begin();
    if (!can_run(*at)) continue;
    if (dice_.one_in(20))
      at->paused_until = now + milliseconds(dice_.between(1, dice_.one_in(30) ? 3000 : 20));
    else run(*at);
    return true;
  }
  return false;
}

TimePoint Tasks::next() const {
  auto result = TimePoint::max();
  for (const auto& task : tasks_) {
    if (task.ended) continue;
    if (task.paused_until > now) result = std::min(result, task.paused_until);
    else if (task.until > now) result = std::min(result, task.until);
  }
  return result;
}

bool Tasks::all_ended() const {
  return std::all_of(tasks_.begin(), tasks_.end(), [](const Task& task) { return task.ended; });
}

int Tasks::wait(pollfd* entries, nfds_t count, int timeout) {
  auto& task = *running_;
  task.entries = entries;
  task.count = count;
  task.until = timeout < 0 ? TimePoint::max() : now + milliseconds(timeout);
  leave(false);
  return task.ready;
}

void Tasks::join(const Task* other) {
  running_->joins = other;
  wait(nullptr, 0, -1);
  running_->joins = nullptr;
}

}  // namespace tessera::sim

using tessera::sim::tasks;

extern "C" {

int poll(pollfd* entries, nfds_t count, int timeout) {
  return tasks ? tasks->wait(entries, count, timeout)
               : tessera::sim::really_poll(entries, count, timeout);
}

int connect(int fd, const sockaddr* address, socklen_t size) {
  if (tasks && address->sa_family == AF_INET) return tasks->connect_it(fd);
  return static_cast<int>(::syscall(SYS_connect, fd, address, size));
}

int accept4(int fd, sockaddr* address, socklen_t* size, int flags) {
  if (tasks && tasks->lacks_files()) {
    errno = EMFILE;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_accept4, fd, address, size, flags));
}

int nanosleep(const timespec* time, timespec* left) {
  if (!tasks) return ::clock_nanosleep(CLOCK_MONOTONIC, 0, time, left);
  tasks->wait(nullptr, 0, static_cast<int>(time->tv_sec * 1000 + time->tv_nsec / 1'000'000 + 1));
  return 0;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  if (!tasks)
    return tessera::sim::of_the_system(&::pthread_create, "pthread_create")(thread, attributes,
                                                                            body, argument);
  *thread = reinterpret_cast<pthread_t>(tasks->add([=] { body(argument); }));
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  if (!tasks) return tessera::sim::of_the_system(&::pthread_join, "pthread_join")(thread, result);
  tasks->join(reinterpret_cast<const tessera::sim::Tasks::Task*>(thread));
  return 0;
}
}

std::chrono::steady_clock::time_point std::chrono::steady_clock::now() noexcept {
  if (tasks) return tasks->now;
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time_point(std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec));
}

std::random_device::result_type std::random_device::_M_getval() {
  return tasks ? tasks->random() : 4;
}
