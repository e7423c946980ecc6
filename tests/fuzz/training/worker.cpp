#include "fuzz/training/worker.h"

#include <csignal>
#include <cstring>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace tessera::fuzz {
namespace {

using Clock = std::chrono::steady_clock;

void write_all(int fd, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const auto count = write(fd, text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) _exit(3);  // the parent is gone
    done += static_cast<size_t>(count);
  }
}

std::string tail_of(int log) {
  std::string text(4000, '\0');
  const auto size = lseek(log, 0, SEEK_END);
  const auto begin = std::max<off_t>(0, size - static_cast<off_t>(text.size()));
  const auto count = pread(log, text.data(), text.size(), begin);
  text.resize(count > 0 ? static_cast<size_t>(count) : 0);
  return text;
}

}  // namespace

Worker::Worker(Source source, uint64_t first, uint64_t stride, uint64_t end,
               std::chrono::seconds patience)
    : source_(std::move(source)), next_(first), stride_(stride), end_(end), patience_(patience) {
  start();
}

Worker::~Worker() { stop(); }

void Worker::start() {
  done_ = next_ >= end_;
  if (done_) return;
  int pipe_ends[2];
  if (pipe2(pipe_ends, O_CLOEXEC) != 0) throw std::runtime_error("the fuzzer cannot make a pipe");
  log_ = memfd_create("fuzz-log", MFD_CLOEXEC);
  started_ = Clock::now();
  child_ = fork();
  if (child_ < 0) throw std::runtime_error("the fuzzer cannot fork");
  if (child_ == 0) {
    close(pipe_ends[0]);
    work(pipe_ends[1]);
  }
  close(pipe_ends[1]);
  reports_ = pipe_ends[0];
}

void Worker::stop() {
  if (child_ > 0) {
    kill(child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  if (reports_ >= 0) close(reports_);
  if (log_ >= 0) close(log_);
  child_ = reports_ = log_ = -1;
  pending_.clear();
}

/// In the child. A report is the seed, the finding's kind and its text, each ended by a zero byte.
void Worker::work(int reports) {
  signal(SIGPIPE, SIG_IGN);
  dup2(log_, STDOUT_FILENO);
  dup2(log_, STDERR_FILENO);
  at::set_num_threads(1);
  for (uint64_t seed = next_; seed < end_; seed += stride_) {
    if (ftruncate(log_, 0) != 0 || lseek(log_, 0, SEEK_SET) != 0) _exit(4);
    Finding finding;
    try {
      finding = run_case(source_(seed)).value_or(Finding{});
    } catch (const std::exception& error) {
      finding = {"fuzzer", error.what()};
    }
    std::string report = std::to_string(seed) + '\0' + finding.kind + '\0' + finding.text + '\0';
    write_all(reports, report);
  }
  _exit(0);
}

std::optional<Worker::Report> Worker::next(Clock::time_point deadline) {
  while (!done_) {
    const auto first = pending_.find('\0');
    const auto second = first == std::string::npos ? first : pending_.find('\0', first + 1);
    const auto third = second == std::string::npos ? second : pending_.find('\0', second + 1);
    if (third != std::string::npos) {
      Report report{std::stoull(pending_.substr(0, first)), std::nullopt};
      if (second > first + 1)
        report.finding = Finding{pending_.substr(first + 1, second - first - 1),
                                 pending_.substr(second + 1, third - second - 1)};
      pending_.erase(0, third + 1);
      next_ = report.seed + stride_;
      started_ = Clock::now();
      if (next_ >= end_) {
        stop();
        done_ = true;
      }
      return report;
    }
    const auto hangs = started_ + patience_;
    const auto left = std::min(deadline, hangs) - Clock::now();
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(left).count();
    pollfd waiting{reports_, POLLIN, 0};
    if (poll(&waiting, 1, static_cast<int>(std::max<int64_t>(0, wait))) <= 0) {
      if (Clock::now() >= hangs) return died(true);
      if (Clock::now() >= deadline) return std::nullopt;
      continue;
    }
    char buffer[4096];
    const auto count = read(reports_, buffer, sizeof buffer);
    if (count == 0) return died(false);
    if (count > 0) pending_.append(buffer, static_cast<size_t>(count));
  }
  return std::nullopt;
}

/// The child has ended by itself, or is ended now. Another one goes on with the next seed.
Worker::Report Worker::died(bool hung) {
  if (hung) kill(child_, SIGKILL);
  int status = 0;
  waitpid(child_, &status, 0);
  child_ = -1;
  Report report{next_, Finding{hung ? "hang" : "crash", ""}};
  if (hung) report.finding->text = fmt::format("no end after {} s", patience_.count());
  else if (WIFSIGNALED(status)) report.finding->text = strsignal(WTERMSIG(status));
  else report.finding->text = fmt::format("exit status {}", WEXITSTATUS(status));
  report.finding->text += "\n" + tail_of(log_);
  next_ += stride_;
  stop();
  start();
  return report;
}

std::optional<Finding> run_in_child(const Case& which, std::chrono::seconds patience) {
  Worker worker([&](uint64_t) { return which; }, 0, 1, 1, patience);
  const auto report = worker.next(Clock::now() + 2 * patience);
  return report ? report->finding : std::nullopt;
}

}  // namespace tessera::fuzz
