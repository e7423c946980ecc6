#include "train/reporter.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/error.h"

namespace tessera::train {
namespace {

bool on_terminal() {
  const char* passed_on = std::getenv("TESSERA_TTY");
  return ::isatty(STDOUT_FILENO) == 1 || (passed_on != nullptr && std::string_view(passed_on) == "1");
}

/// 7344128 as "7,344,128".
std::string grouped(int64_t value) {
  std::string text = std::to_string(value);
  for (auto at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) {
    text.insert(static_cast<size_t>(at), 1, ',');
  }
  return text;
}

std::string memory_row(const std::string& name, const MemoryUse& use) {
  return fmt::format("{:<20}{:>16}{:>16}{:>18}{:>16}", name, grouped(use.parameters), grouped(use.gradients),
                     grouped(use.optimizer_state), grouped(use.total()));
}

}  // namespace

Reporter::Reporter(const Config& config) : config_(config), log_(nullptr, &std::fclose), terminal_(on_terminal()) {
  if (!config.train.log.empty()) {
    log_.reset(std::fopen(config.train.log.c_str(), "we"));
    if (!log_) {
      throw UsageError(config.at("train.log") + config.train.log + ": " + std::strerror(errno));
    }
  }
}

Reporter::~Reporter() { clear_bar(); }

void Reporter::line(const std::string& text) {
  clear_bar();
  std::fputs((text + "\n").c_str(), stdout);
  std::fflush(stdout);
}

void Reporter::step(const StepRecord& record) {
  done_ = record.step + 1;
  seconds_ += record.ms / 1000;
  if (log_) {
    const nlohmann::ordered_json json = {
        {"step", record.step}, {"loss", record.loss}, {"grad_norm", record.grad_norm},
        {"lr", record.lr},     {"ms", record.ms},     {"tokens_per_s", record.tokens_per_s}};
    const std::string text = json.dump() + "\n";
    if (std::fputs(text.c_str(), log_.get()) < 0 || std::fflush(log_.get()) != 0) {
      throw Error(config_.at("train.log") + config_.train.log + ": cannot write: " + std::strerror(errno));
    }
  }
  const int64_t steps = config_.train.steps;
  if (done_ % config_.train.log_every == 0 || done_ == steps || record.step == 0) {
    const std::string last = std::to_string(steps - 1);
    line(fmt::format("step {:>{}}/{}  loss {:.4f}  grad_norm {:.4f}  lr {:.3e}  {:.1f} ms  {:.0f} tokens/s",
                     record.step, last.size(), last, record.loss, record.grad_norm, record.lr, record.ms,
                     record.tokens_per_s));
  }
  draw_bar();
}

void Reporter::evaluation(int64_t step, double loss, const std::optional<double>& bigram) {
  std::string text = fmt::format("evaluation after {} steps: loss {:.4f}", step, loss);
  if (bigram) {
    text += fmt::format("  (a bigram model of the same split reaches {:.4f})", *bigram);
  }
  line(text);
}

void Reporter::memory_table(const std::vector<MemoryUse>& ranks, const MemoryUse& unsharded) {
  line(fmt::format("{:<20}{:>16}{:>16}{:>18}{:>16}", "bytes per rank", "parameters", "gradients", "optimizer state",
                   "total"));
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    line(memory_row("rank " + std::to_string(rank), ranks[rank]));
  }
  line(memory_row("unsharded", unsharded));
}

void Reporter::draw_bar() {
  if (!terminal_ || config_.train.steps == 0) {
    return;
  }
  constexpr int kWidth = 40;
  const double part = static_cast<double>(done_) / static_cast<double>(config_.train.steps);
  const int full = static_cast<int>(part * kWidth);
  const auto left = static_cast<int64_t>(
      std::ceil(seconds_ / static_cast<double>(done_) * static_cast<double>(config_.train.steps - done_)));
  clear_bar();
  fmt::print(stdout, "[{:#<{}}{:.<{}}] {:3.0f} %  {}/{}  {}:{:02} left", "", full, "", kWidth - full, part * 100, done_,
             config_.train.steps, left / 60, left % 60);
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
