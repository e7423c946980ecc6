#include "tessera/step/agreement.h"

#include <algorithm>
#include <exception>
#include <map>
#include <new>
#include <vector>

#include <c10/util/Exception.h>
#include <sys/resource.h>

#include "tessera/detail/report_to_launcher.h"

namespace tessera {
namespace {

/// "RLIMIT_AS 300 MiB; peak 280 MiB": the limit of this process and its largest resident memory.
std::string memory_use() {
  const auto mebibytes = [](rlim_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  rlimit addresses{};
  rusage usage{};
  ::getrlimit(RLIMIT_AS, &addresses);
  ::getrusage(RUSAGE_SELF, &usage);
  const bool limited = addresses.rlim_cur != RLIM_INFINITY;
  return (limited ? "RLIMIT_AS " + mebibytes(addresses.rlim_cur) : std::string("no RLIMIT_AS")) +
         "; peak " + mebibytes(static_cast<rlim_t>(usage.ru_maxrss) << 10);
}

}  // namespace

std::string message_of(const std::exception& error) {
  std::string text = error.what();
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error))
    text = torch_error->what_without_backtrace();
  const bool allocation = dynamic_cast<const std::bad_alloc*>(&error) ||
                          text.find("can't allocate memory") != std::string::npos;
  return allocation ? "out of memory (" + memory_use() + "): " + text : text;
}

void agree(const ProcessGroup& group, const std::function<void()>& prepare) {
  std::string mine;
  try {
    prepare();
  } catch (const std::exception& error) {
    mine = message_of(error);
    if (mine.empty()) mine = "an error without a message";
  }
  std::map<std::string, std::vector<int>> ranks;
  const std::vector<std::string> messages = ProcessGroup(group).all_gather_bytes(mine);
  for (size_t rank = 0; rank < messages.size(); ++rank)
    if (!messages[rank].empty()) ranks[messages[rank]].push_back(static_cast<int>(rank));
  if (ranks.empty()) return;
  std::string text;
  std::vector<int> began;
  for (const auto& [message, where] : ranks) {
    for (const int rank : where) began.push_back(group.world_ranks()[rank]);
    if (!text.empty()) text += '\n';
    if (where.size() < messages.size()) {
      text += where.size() > 1 ? "ranks " : "rank ";
      for (size_t i = 0; i < where.size(); ++i) text += (i ? ", " : "") + std::to_string(where[i]);
      text += ": ";
    }
    text += message;
  }
  std::sort(began.begin(), began.end());
  detail::report_agreed(began, text);
  throw AgreedError(text);
}

}  // namespace tessera
