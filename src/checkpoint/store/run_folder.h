#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

// The folder of a run on disk: `step-00000120` is a committed checkpoint,
// `.step-00000120.partial-…` is an unfinished one, and `.step-00000120.replaced-…` a complete one
// that a newer checkpoint of this step replaces. All functions throw Error with path and reason if
// the system reports a failure.
//
// [Note: replaced checkpoints] A crash may leave some renames of a replacement undone: if a file
// system cannot exchange two names there may be no `step-…`, and some of several places may have
// the old version. So the old version is kept until all places have the new one, and a reader takes
// the version that all places have.

namespace tessera::store {

std::string step_name(int64_t step);
std::optional<int64_t> step_of_name(std::string_view name);
/// A new name each time, unique among processes and hosts.
std::string partial_name(int64_t step);
bool is_partial_name(std::string_view name);

/// Paths of the complete checkpoints that have been at `path`: itself, if it exists, and replaced
/// ones. Local.
std::vector<std::string> versions_of(const std::string& path);

/// `path`, or a replaced checkpoint if there is only that. Local.
std::string readable_version(const std::string& path);

/// The end of the manifest, which has its digest; "-" if there is none.
std::string mark_of(const std::string& path);

/// Steps of the complete checkpoints, ascending; empty if the folder is missing.
std::vector<int64_t> committed_steps(const std::string& folder);

/// The file that marks a checkpoint as unsound. Its text names the tensors with elements that are
/// NaN or infinite.
inline constexpr const char* kUnsoundName = "unsound.txt";

/// The `steps` whose checkpoints are marked as unsound.
std::set<int64_t> unsound_steps(const std::string& folder, const std::vector<int64_t>& steps);

/// The checkpoints among `steps` (ascending) to remove: all except the last `keep_last` sound ones,
/// sound multiples of `keep_every`, the last `keep_last` unsound ones after the last sound one,
/// `written`, and `keep`.
std::vector<int64_t> expired(const std::vector<int64_t>& steps, int64_t written, int keep_last,
                             int64_t keep_every, const std::set<int64_t>& unsound = {},
                             const std::vector<int64_t>& keep = {});

std::string without_trailing_slashes(std::string folder);

void sync_run(const std::string& folder);

/// Renames `partial` to the committed checkpoint of `step`. If there was a checkpoint of that step,
/// it becomes a replaced one, whose path is returned; otherwise returns "".
std::string publish(const std::string& folder, const std::string& partial, int64_t step);

/// Undoes publish(), which returned `replaced`.
void unpublish(const std::string& folder, int64_t step, const std::string& replaced);

/// Removes the replaced checkpoints, of one step or of all. If a step has no other checkpoint, its
/// replaced one gets the name back. For all steps, the ranks must share the folder.
void settle_replaced(const std::string& folder, std::optional<int64_t> only = {});

/// Removes a checkpoint. It is renamed first, so that a partly removed checkpoint is never mistaken
/// for a committed one.
void remove_checkpoint(const std::string& folder, int64_t step);

/// Removes a folder and its contents, if it exists.
void remove_tree(const std::string& path);

/// Removes everything with a partial name, and files that find_places() has left. Unless `all` is
/// true, keeps those that changed within the last hour.
void remove_leftovers(const std::string& folder, bool all);

}  // namespace tessera::store
