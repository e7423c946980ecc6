#include "train/state/checkpoint_to_resume.h"

#include <fmt/format.h>

#include "tessera/checkpoint_store.h"

namespace tessera::train {
namespace {

std::string one_line(std::string text) {
  while (!text.empty() && text.back() == '\n') text.pop_back();
  for (size_t at = 0; (at = text.find('\n', at)) != text.npos;) text.replace(at, 1, "; ");
  return text;
}

}  // namespace

CheckpointToResume checkpoint_to_resume(const std::string& folder, const ProcessGroup& group) {
  const auto newest = latest_checkpoint(folder, group);
  const auto sound = latest_sound_checkpoint(folder, group);
  if (!newest || newest == sound) return {newest.value_or(""), ""};
  return {sound ? *sound : *newest, fmt::format("{} has elements that are not finite: {}{}",
                                                *newest, one_line(unsound_tensors(*newest)),
                                                sound ? "; resuming from " + *sound : "")};
}

}  // namespace tessera::train
