#include "tessera/detail/report_to_launcher.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <string>

#include "tessera/detail/rank_report.h"

namespace tessera::detail {
namespace {

std::mutex report_mutex;
std::atomic<bool> reported{false};

const char* report_path() {
  const char* path = std::getenv("TESSERA_REPORT");
  return path && *path ? path : nullptr;
}

void write(RankReport::Kind kind, int signal, const std::vector<int>& ranks,
           const std::string& text) noexcept {
  try {
    const RankReport report{kind, signal, ranks, text};
    const char* path = report_path();
    if (!path) return;
    std::lock_guard lock(report_mutex);
    // The launcher may read at any moment, so it must never see a part of a report.
    const std::string unfinished = std::string(path) + ".tmp";
    {
      std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
      file << report.to_text();
      if (!file.flush()) return;
    }
    if (std::rename(unfinished.c_str(), path) == 0) reported = true;
  } catch (...) {
  }
}

}  // namespace

void report_agreed(const std::vector<int>& began, const std::string& text) noexcept {
  if (!began.empty()) write(RankReport::Kind::agreed, 0, began, text);
}

void report_broken(const std::vector<int>& ranks, const std::string& text) noexcept {
  if (!ranks.empty()) write(RankReport::Kind::broken, 0, ranks, text);
}

void report_stop(int signal, const std::vector<int>& ranks) noexcept {
  write(RankReport::Kind::stop, signal, ranks, {});
}

void withdraw_report() noexcept {
  if (!reported.load(std::memory_order_relaxed)) return;
  try {
    std::lock_guard lock(report_mutex);
    if (const char* path = report_path()) std::remove(path);
    reported = false;
  } catch (...) {
  }
}

std::vector<int> minority(int size, const std::function<bool(int, int)>& same) {
  for (int candidate = 0; candidate < size; ++candidate) {
    std::vector<int> others;
    for (int r = 0; r < size; ++r)
      if (!same(candidate, r)) others.push_back(r);
    if (2 * static_cast<int>(others.size()) < size) return others;
  }
  return {};
}

}  // namespace tessera::detail
