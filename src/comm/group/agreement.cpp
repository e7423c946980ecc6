#include "tessera/step/agreement.h"

#include <exception>
#include <map>
#include <vector>

#include <c10/util/Exception.h>

namespace tessera {

std::string message_of(const std::exception& error) {
  if (const auto* torch_error = dynamic_cast<const c10::Error*>(&error)) {
    return torch_error->what_without_backtrace();
  }
  return error.what();
}

void agree(const ProcessGroup& group, const std::function<void()>& prepare) {
  std::string mine;
  try {
    prepare();
  } catch (const std::exception& error) {
    mine = message_of(error);
    if (mine.empty()) {
      mine = "an error without a message";
    }
  }
  std::map<std::string, std::vector<int>> ranks;
  const std::vector<std::string> messages = ProcessGroup(group).all_gather_bytes(mine);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (!messages[rank].empty()) {
      ranks[messages[rank]].push_back(static_cast<int>(rank));
    }
  }
  if (ranks.empty()) {
    return;
  }
  std::string text;
  for (const auto& [message, where] : ranks) {
    if (!text.empty()) {
      text += '\n';
    }
    if (where.size() < messages.size()) {
      text += where.size() > 1 ? "ranks " : "rank ";
      for (size_t i = 0; i < where.size(); ++i) {
        text += (i ? ", " : "") + std::to_string(where[i]);
      }
      text += ": ";
    }
    text += message;
  }
  throw AgreedError(text);
}

}  // namespace tessera
