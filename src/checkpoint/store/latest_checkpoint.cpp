#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include <fmt/format.h>

#include "checkpoint/store/run_folder.h"
#include "tessera/checkpoint_store.h"
#include "tessera/detail/classic.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {
namespace {

std::string path_of_step(const std::string& folder, int64_t step) {
  return store::without_trailing_slashes(folder) + "/" + store::step_name(step);
}

/// One rank's checkpoints: step, whether it is unsound, and the mark of its manifest.
struct Seen {
  bool unsound;
  std::string mark;
};

std::string text_of_steps(const std::string& folder) {
  std::string text;
  const auto steps = store::committed_steps(folder);
  const auto unsound = store::unsound_steps(folder, steps);
  for (const int64_t step : steps)
    text += fmt::format("{} {} {} ", step, unsound.count(step),
                        store::mark_of(store::readable_version(path_of_step(folder, step))));
  return text;
}

bool opens(const std::string& path, const ProcessGroup& group) {
  try {
    Checkpoint(path, group);
    return true;
  } catch (const CheckpointDamagedError&) {
    return false;
  } catch (const CheckpointVersionError&) {
    return false;
  }
}

std::optional<std::string> latest(const std::string& folder, ProcessGroup group, bool sound) {
  std::string mine;
  agree(group, [&] { mine = text_of_steps(folder); });
  std::map<int64_t, std::vector<Seen>> by_step;
  for (const auto& rank : group.all_gather_bytes(mine)) {
    detail::Classic<std::istringstream> text(rank);
    int64_t step = 0;
    Seen seen{};
    while (text >> step >> seen.unsound >> seen.mark) by_step[step].push_back(seen);
  }
  std::optional<std::string> first;
  for (auto at = by_step.rbegin(); at != by_step.rend(); ++at) {
    const auto& [step, seen] = *at;
    const bool unsound =
        std::any_of(seen.begin(), seen.end(), [](const Seen& each) { return each.unsound; });
    if (sound && unsound) continue;
    const std::string path = path_of_step(folder, step);
    const bool everywhere = seen.size() == static_cast<size_t>(group.size()) &&
                            std::all_of(seen.begin(), seen.end(), [&](const Seen& each) {
                              return each.mark == seen.front().mark;
                            });
    if (everywhere || opens(path, group)) return path;
    if (!first) first = path;
  }
  return first;
}

}  // namespace

std::optional<std::string> latest_checkpoint(const std::string& folder) {
  const auto steps = store::committed_steps(folder);
  if (steps.empty()) return std::nullopt;
  return path_of_step(folder, steps.back());
}

std::optional<std::string> latest_sound_checkpoint(const std::string& folder) {
  const auto steps = store::committed_steps(folder);
  const auto unsound = store::unsound_steps(folder, steps);
  const auto sound = std::find_if(steps.rbegin(), steps.rend(),
                                  [&](int64_t step) { return unsound.count(step) == 0; });
  if (sound == steps.rend()) return std::nullopt;
  return path_of_step(folder, *sound);
}

std::string unsound_tensors(const std::string& path) {
  std::ifstream file(path + "/" + store::kUnsoundName, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<std::string> latest_checkpoint(const std::string& folder, const ProcessGroup& group) {
  return latest(folder, group, false);
}

std::optional<std::string> latest_sound_checkpoint(const std::string& folder,
                                                   const ProcessGroup& group) {
  return latest(folder, group, true);
}

}  // namespace tessera
