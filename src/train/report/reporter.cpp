#include "train/report/reporter.h"

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/detail/write_file.h"
#include "tessera/error.h"

namespace tessera::train {
namespace {

bool on_terminal() {
  const char* passed_on = std::getenv("TESSERA_TTY");
  return ::isatty(STDOUT_FILENO) == 1 ||
         (passed_on != nullptr && std::string_view(passed_on) == "1");
}

/// Not a terminal, a pipe or /dev/null, which several runs may share.
bool is_regular(std::FILE* file) {
  struct stat status {};
  return ::fstat(::fileno(file), &status) == 0 && S_ISREG(status.st_mode);
}

/// 7344128 as "7,344,128".
std::string grouped(int64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<size_t>(at), 1, ',');
  return text;
}

std::string memory_row(const std::string& name, const MemoryUse& use) {
  return fmt::format("{:<20}{:>16}{:>16}{:>18}{:>16}", name, grouped(use.parameters),
                     grouped(use.gradients), grouped(use.optimizer_state), grouped(use.total()));
}

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  return whole >= 3600 ? fmt::format("{}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60)
                       : fmt::format("{}:{:02}", whole / 60, whole % 60);
}

/// " accuracy 0.9312" for every figure except the loss. A confusion matrix has more figures than a
/// line can show; the log has all.
template <class Figures>
std::string others(const Figures& figures) {
  constexpr size_t kMost = 16;
  std::string text;
  size_t shown = 0;
  for (const auto& [name, value] : figures)
    if (name != "loss" && shown++ < kMost) text += fmt::format("  {} {:.4f}", name, value);
  if (shown > kMost) text += fmt::format("  and {} more", shown - kMost);
  return text;
}

}  // namespace

void say_without_output(const std::string& text) {
  if (text.rfind("warning", 0) == 0) std::fprintf(stderr, "tessera: %s\n", text.c_str());
}

Reporter::Reporter(const Config& config, int64_t first_step)
    : config_(config), log_(nullptr, &std::fclose), terminal_(on_terminal()) {
  open_log(first_step);
}

void Reporter::open_log(int64_t first_step) {
  const std::string& path = config_.train.log;
  if (path.empty()) return;
  if (!log_) log_ = open_locked(path);
  if (first_step > 0) {
    named(config_.at("train.log"), [&] { keep_log_before(path, first_step); });
    log_ = open_locked(path);  // keep_log_before() has made a new file of this name
  } else if (is_regular(log_.get()) && ::ftruncate(::fileno(log_.get()), 0) != 0) {
    throw UsageError(config_.at("train.log") + path + ": " + std::strerror(errno));
  }
  if (is_regular(log_.get())) events_.open(path, first_step > 0);
}

/// Two runs that write one log would mix their lines.
Reporter::File Reporter::open_locked(const std::string& path) const {
  File file(std::fopen(path.c_str(), "ae"), &std::fclose);
  if (!file) throw UsageError(config_.at("train.log") + path + ": " + std::strerror(errno));
  if (is_regular(file.get()) && ::flock(::fileno(file.get()), LOCK_EX | LOCK_NB) != 0 &&
      errno == EWOULDBLOCK) {
    throw UsageError(config_.at("train.log") + path +
                     ": another run is writing this file; expected a file of its own for each run");
  }
  return file;
}

Reporter::~Reporter() { clear_bar(); }

void Reporter::line(const std::string& text) {
  if (config_.train.log_every == 0) return say_without_output(text);
  clear_bar();
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void Reporter::step(const StepRecord& record, int64_t steps) {
  done_ = record.step + 1;
  steps_ = steps;
  ++timed_;
  seconds_ += record.ms / 1000;
  samples_ += record.samples;
  tokens_ += record.tokens;
  const int64_t every = config_.train.log_every;
  if (every == 0) return;
  if (done_ % every == 0 || done_ == steps || record.step == 0) {
    const bool endless = steps == kEndless;
    const std::string last = endless ? "" : std::to_string(steps - 1);
    const double rate = static_cast<double>(record.tokens > 0 ? record.tokens : record.samples) /
                        (record.ms / 1000);
    line(fmt::format(
        "step {:>{}}{}{}  loss {:.4f}{}  grad_norm {:.4f}  lr {:.3e}  {:.1f} ms  {:.0f} {}/s{}",
        record.step, last.size(), endless ? "" : "/", last, record.loss, others(record.figures),
        record.grad_norm, record.lr, record.ms, rate, record.tokens > 0 ? "tokens" : "samples",
        endless ? ""
                : "  ETA " + duration(seconds_ / static_cast<double>(timed_) *
                                      static_cast<double>(steps - done_))));
  }
  if (steps != kEndless) draw_bar();
}

void Reporter::log(const StepRecord& record) {
  if (!log_ && !listener_) return;
  const std::string text = json_of(record, config_.train.loss_scale.enabled).dump();
  if (log_ && !write_through(log_.get(), text + "\n"))
    throw Error(config_.at("train.log") + config_.train.log +
                ": cannot write: " + std::strerror(errno));
  if (listener_) listener_(text);
}

void Reporter::event(const std::string& name, int64_t step, nlohmann::ordered_json event) {
  if (!log_ && !listener_) return;
  const std::string text = event_line(name, step, std::move(event));
  const std::string problem = events_.write(text);
  if (!problem.empty()) line("warning: " + problem + "; later events are not written");
  last_event_ = std::chrono::steady_clock::now();
  if (listener_) listener_(text);
}

void Reporter::progress(int64_t step, const CommStats& communication) {
  constexpr std::chrono::seconds kLeast{10};
  if (std::chrono::steady_clock::now() - last_event_ < kLeast) return;
  event("progress", step, {{"communication", json_of(communication)}});
}

void Reporter::log_again(const StepRecord& record) {
  open_log(record.step);
  log(record);
}

void Reporter::evaluation(int64_t step, const std::map<std::string, double>& figures,
                          const std::optional<double>& baseline, const std::string& baseline_name) {
  std::string text = fmt::format("evaluation after {} steps: loss {:.4f}{}", step,
                                 figures.at("loss"), others(figures));
  if (baseline) text += fmt::format("  ({} reaches {:.4f})", baseline_name, *baseline);
  line(text);
}

void Reporter::test(const std::map<std::string, double>& figures) {
  line(fmt::format("test: loss {:.4f}{}", figures.at("loss"), others(figures)));
}

void Reporter::memory_table(const std::vector<MemoryUse>& ranks, const MemoryUse& formula,
                            const MemoryUse& unsharded) {
  line(fmt::format("{:<20}{:>16}{:>16}{:>18}{:>16}", "bytes per rank", "parameters", "gradients",
                   "optimizer state", "total"));
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    line(memory_row("rank " + std::to_string(rank), ranks[rank]));
  line(memory_row("formula", formula));
  line(memory_row("unsharded", unsharded));
}

void Reporter::summary(const TrainResult& result, const CommStats& communication,
                       double waited_for_data) {
  if (timed_ > 0) {
    const double rate = static_cast<double>(tokens_ > 0 ? tokens_ : samples_) / seconds_;
    line(fmt::format(
        "{} steps in {}: {:.0f} {}/s; waited {:.2f} s for data, {:.2f} s for communication", timed_,
        duration(seconds_), rate, tokens_ > 0 ? "tokens" : "samples", waited_for_data,
        communication.waited_seconds));
    line(fmt::format(
        "communication of rank 0: {} calls, {} bytes sent, {} received; {} received a step",
        grouped(static_cast<int64_t>(communication.calls())),
        grouped(static_cast<int64_t>(communication.payload_sent())),
        grouped(static_cast<int64_t>(communication.payload_received())),
        grouped(static_cast<int64_t>(communication.payload_received()) / timed_)));
  }
  if (result.best_eval_loss)
    line(fmt::format("best evaluation loss {:.4f}", *result.best_eval_loss));
  if (result.skipped_steps > 0)
    line(fmt::format("{} steps skipped: their gradients had an infinity at that loss scale",
                     result.skipped_steps));
}

void Reporter::draw_bar() {
  if (!terminal_ || steps_ == 0) return;
  constexpr int kWidth = 40;
  const double part = static_cast<double>(done_) / static_cast<double>(steps_);
  const int full = static_cast<int>(part * kWidth);
  clear_bar();
  fmt::print(
      stdout, "[{:#<{}}{:.<{}}] {:3.0f} %  {}/{}  {} left", "", full, "", kWidth - full, part * 100,
      done_, steps_,
      duration(seconds_ / static_cast<double>(timed_) * static_cast<double>(steps_ - done_)));
  std::fflush(stdout);
  bar_drawn_ = true;
}

void Reporter::clear_bar() {
  if (bar_drawn_) {
    std::fputs("\r\033[2K", stdout);
    std::fflush(stdout);
    bar_drawn_ = false;
  }
}

}  // namespace tessera::train
