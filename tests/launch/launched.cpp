#include "launch/launched.h"

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <stdexcept>

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char** environ;

namespace tessera::launch_test {
namespace {

constexpr double kBound = 20;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int pidfd(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }

std::vector<std::string> environment(const Launched::Variables& set) {
  std::vector<std::string> result;
  for (char** entry = environ; *entry; ++entry) {
    const std::string name = std::string(*entry).substr(0, std::string(*entry).find('='));
    if (set.count(name) == 0 && name != "XDG_RUNTIME_DIR" && name != "OMP_NUM_THREADS")
      result.emplace_back(*entry);
  }
  for (const auto& [name, value] : set) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(const std::vector<std::string>& strings) {
  std::vector<char*> result;
  for (const std::string& text : strings) result.push_back(const_cast<char*>(text.c_str()));
  result.push_back(nullptr);
  return result;
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "launch-test-XXXXXX").string();
  if (!mkdtemp(path_.data())) throw std::runtime_error("no temporary folder");
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

bool TemporaryFolder::empty() const { return std::filesystem::is_empty(path_); }

Watched::Watched(pid_t pid) : pid_(pid), fd_(pidfd(pid)) {}

Watched::~Watched() {
  if (fd_ >= 0) close(fd_);
}

bool Watched::ended(double seconds) const {
  if (fd_ < 0) return true;
  pollfd polled{fd_, POLLIN, 0};
  return poll(&polled, 1, static_cast<int>(seconds * 1000)) == 1;
}

Launched::Launched(const std::vector<std::string>& arguments, const Variables& set, Streams streams)
    : start_(now()) {
  Variables variables = set;
  variables.emplace("TMPDIR", tmp_.path());
  std::vector<std::string> command = streams.front;
  command.push_back(TESSERA_COMMAND);
  command.insert(command.end(), arguments.begin(), arguments.end());
  const auto strings = environment(variables);
  const auto argv = pointers(command);
  const auto envp = pointers(strings);
  int out[2], err[2];
  if (pipe2(out, O_CLOEXEC) != 0 || pipe2(err, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  pid_ = fork();
  if (pid_ == 0) {
    if (streams.terminal >= 0) {
      setsid();
      ioctl(streams.terminal, TIOCSCTTY, 0);
      for (int fd = 0; fd < 3; ++fd) dup2(streams.terminal, fd);
    } else {
      dup2(streams.in >= 0 ? streams.in : null, 0);
      dup2(streams.out >= 0 ? streams.out : out[1], 1);
      dup2(streams.merged ? out[1] : err[1], 2);
    }
    close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    execvpe(argv[0], argv.data(), envp.data());
    _exit(99);
  }
  close(out[1]);
  close(err[1]);
  close(null);
  out_fd_ = out[0];
  err_fd_ = err[0];
}

Launched::~Launched() {
  if (!waited_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  if (out_fd_ >= 0) close(out_fd_);
  if (err_fd_ >= 0) close(err_fd_);
}

void Launched::send(int signal) const { kill(pid_, signal); }

bool Launched::read_more(double until) {
  pollfd polled[] = {{out_fd_, POLLIN, 0}, {err_fd_, POLLIN, 0}};
  if (out_fd_ < 0 && err_fd_ < 0) return false;
  const double left = until - now();
  if (left <= 0 || poll(polled, 2, static_cast<int>(left * 1000) + 1) <= 0)
    throw std::runtime_error("time-out; output: " + out_ + "; errors: " + err_);
  const auto take = [](int& fd, std::string& text) {
    char buffer[65536];
    const ssize_t got = read(fd, buffer, sizeof buffer);
    if (got > 0) {
      text.append(buffer, got);
    } else {
      close(fd);
      fd = -1;
    }
  };
  if (polled[0].revents) take(out_fd_, out_);
  if (polled[1].revents) take(err_fd_, err_);
  return true;
}

void Launched::wait_for(const std::string& text, int times) {
  const double until = now() + kBound;
  while (occurrences(out_, text) + occurrences(err_, text) < times)
    if (!read_more(until))
      throw std::runtime_error("ended without '" + text + "': " + out_ + "; errors: " + err_);
}

std::vector<pid_t> Launched::pids() const {
  std::vector<pid_t> result;
  for (size_t at = 0; (at = out_.find("pid=", at)) != std::string::npos; at += 4)
    result.push_back(std::atoi(out_.c_str() + at + 4));
  return result;
}

int Launched::finish() {
  const double until = now() + kBound;
  while (read_more(until)) {
  }
  const Watched watched(pid_);
  if (!watched.ended(kBound)) throw std::runtime_error("the launcher does not end");
  int status = 0;
  waitpid(pid_, &status, 0);
  waited_ = true;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

double Launched::seconds() const { return now() - start_; }

int occurrences(const std::string& where, const std::string& text) {
  int count = 0;
  for (size_t at = 0; (at = where.find(text, at)) != std::string::npos; at += text.size()) ++count;
  return count;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<std::string> run_shell(int ranks, const std::string& script,
                                   std::vector<std::string> flags) {
  std::vector<std::string> arguments = {"run", "-n", std::to_string(ranks)};
  arguments.insert(arguments.end(), flags.begin(), flags.end());
  arguments.insert(arguments.end(), {"sh", "-c", script});
  return arguments;
}

}  // namespace tessera::launch_test
