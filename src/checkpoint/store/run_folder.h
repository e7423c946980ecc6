#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// A run's folder on disk: `step-00000120` is a committed checkpoint, `.step-00000120.partial-…` is
// none. All functions throw Error with path and reason when the system refuses.

namespace tessera::store {

std::string step_name(int64_t step);
std::optional<int64_t> step_of_name(std::string_view name);
/// A new name each time, unique among processes and hosts.
std::string partial_name(int64_t step);
bool is_partial_name(std::string_view name);

/// Steps of the committed checkpoints, ascending; none where there is no folder.
std::vector<int64_t> committed_steps(const std::string& folder);

/// Which of `steps` (ascending) go: not the `keep_last` last, nor multiples of `keep_every`, nor
/// `written`.
std::vector<int64_t> expired(const std::vector<int64_t>& steps, int64_t written, int keep_last,
                             int64_t keep_every);

/// mkdir -p, synced.
void make_folder(const std::string& folder);
void sync_folder(const std::string& folder);

/// `partial` becomes the committed checkpoint of `step`, in one rename, and is synced. Returns
/// where one that was there is now, under a partial name; "" when there was none.
std::string publish(const std::string& folder, const std::string& partial, int64_t step);

/// Removes a committed checkpoint: first its name, so that a half-removed one is never taken for
/// committed.
void remove_checkpoint(const std::string& folder, int64_t step);

/// Removes a folder with all that is in it; nothing when it is not there.
void remove_tree(const std::string& path);

/// Removes everything with a partial name.
void remove_leftovers(const std::string& folder);

}  // namespace tessera::store
