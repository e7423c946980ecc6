#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/safetensors.h"

// Checkpoints of one run in one folder, with one subfolder for each step: `step-00000120/` holds a
// manifest, weights and slices of optimizer state as safetensors files, and text files. A subfolder
// of that name is always complete: it is written under a hidden name, synced, and then renamed. The
// format and the guarantees are in docs/checkpoints.md. (Activation checkpointing is in
// tessera/activation_checkpoint.h.)

#pragma GCC visibility push(default)
namespace tessera {

struct CheckpointStoreOptions {
  /// Number of newest sound checkpoints that are kept, at least 1. The one just written always is.
  /// Checkpoints with NaN or infinity are unsound; docs/checkpoints.md says how long they stay.
  int keep_last = 2;
  /// Checkpoints of steps that are multiples of this number are kept for ever. 0: none.
  int64_t keep_every = 0;
  /// Limit for each wait of `commit` for other ranks' disks, if it is longer than the group's own
  /// timeout.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// The checkpoint folder of one run, opened for writing. There is one writer at a time: rank 0
/// holds a lock on `folder/.lock` until the last copy of this object and the last CheckpointWriter
/// made from it are destroyed. The kernel releases the lock when the process ends for any reason.
/// Copies are cheap and share the same state. If the hosts do not share the folder, each host has
/// one with the files of its ranks, and a manifest of all files; its lowest rank takes the role of
/// rank 0 there. docs/checkpoints.md has the rules.
class CheckpointStore {
 public:
  /// Makes the folder if it is missing, locks it, removes the unfinished checkpoints of earlier
  /// runs, and completes replacements that they began. Throws UsageError on every rank if another
  /// process holds the lock (the text names its pid and host), if an option is out of range, or if
  /// a rank cannot write the folder. Collective.
  explicit CheckpointStore(const std::string& folder, ProcessGroup group = ProcessGroup(),
                           CheckpointStoreOptions options = {});
  ~CheckpointStore();
  CheckpointStore(const CheckpointStore&);
  CheckpointStore& operator=(const CheckpointStore&);

  const std::string& folder() const;  ///< Local.
  /// True if all ranks see the same folder. Local.
  bool shared() const;
  /// True if this rank is the lowest of those that see the same folder. Local.
  bool leads() const;
  const CheckpointStoreOptions& options() const;  ///< Local.
  const ProcessGroup& group() const;              ///< Local.

  struct [[gnu::visibility("hidden")]] Impl;

 private:
  friend class CheckpointWriter;
  std::shared_ptr<Impl> impl_;
};

/// Name of the slice set that holds optimizer state. See CheckpointWriter::add_slices().
inline constexpr const char* kOptimizerSlices = "optimizer";

/// Writes one checkpoint. Every rank makes a writer, adds its own files (possibly none), and calls
/// `commit`. An error while adding is stored and thrown by `commit` on every rank, so that ranks
/// can continue with their collectives; after the error nothing more is written. Destruction
/// without `commit` removes the files; it is not a collective. For one thread at a time.
class CheckpointWriter {
 public:
  /// `step`: the same on all ranks, 0 or more. An existing checkpoint of that step stays until
  /// `commit` replaces it. Collective.
  CheckpointWriter(const CheckpointStore& store, int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Adding is local. File names are plain names, each used once among all ranks, that do not begin
  // with '.' or "manifest.".

  /// Writes a safetensors file. Tensors may be on any device and have any strides; they are written
  /// in row-major order, as weights are.
  void add_tensors(const std::string& file,
                   const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const SafetensorsMetadata& metadata = {});
  /// Begins a safetensors file that is written tensor by tensor: call `write_tensor` for each of
  /// `specs`, in any order, before `commit`. Takes memory for one tensor.
  void begin_tensors(const std::string& file, std::vector<SafetensorsSpec> specs,
                     const SafetensorsMetadata& metadata = {});
  void write_tensor(const std::string& file, const std::string& name, const at::Tensor& tensor);
  /// Writes a text file, such as JSON or YAML.
  void add_text(const std::string& file, const std::string& text);
  /// Writes this rank's slices of the slice set `set` to `<set>-00001-of-00004.safetensors`; at
  /// most once for each set. Slices of different sets are independent of each other. Parameters
  /// that were never stepped may be left out. The slices of all ranks together must contain all
  /// elements of every other parameter. Two slices of one rank must not have the same range.
  void add_slices(const std::vector<StateSlice>& slices, const std::string& set = kOptimizerSlices);

  /// When it returns, the checkpoint is on disk under its final name and older checkpoints are
  /// pruned, except those of the steps `keep`, which is the same on all ranks. (If that failed, a
  /// line in the log says so.) Returns the checkpoint's folder. If anything went wrong on any rank,
  /// throws UsageError on every rank with rank, path and reason; then nothing of the checkpoint
  /// remains, unless the text says that it was committed, and older checkpoints are unchanged.
  /// Collective.
  std::string commit(const std::vector<int64_t>& keep = {});

 private:
  struct [[gnu::visibility("hidden")]] Impl;
  std::unique_ptr<Impl> impl_;
};

/// The committed checkpoint with the highest step in `folder`; nullopt if there is none or the
/// folder is missing. It is not verified; opening it as a Checkpoint does that. Takes no lock.
/// Local.
std::optional<std::string> latest_checkpoint(const std::string& folder);

/// The same among the checkpoints without NaN or infinity; see CheckpointStoreOptions::keep_last.
std::optional<std::string> latest_sound_checkpoint(const std::string& folder);

/// The same for a folder that hosts need not share: the newest checkpoint whose files the ranks of
/// `group` together have. A checkpoint that was cut off between the renames of two hosts is
/// skipped. If none is complete, returns the newest one; opening it says what is missing. The
/// returned path ends in the same step on all ranks; `folder` may differ between them. Collective.
std::optional<std::string> latest_checkpoint(const std::string& folder, const ProcessGroup& group);
std::optional<std::string> latest_sound_checkpoint(const std::string& folder,
                                                   const ProcessGroup& group);

/// The text of Checkpoint::unsound() for the committed checkpoint at `path`, from the file
/// unsound.txt alone; "" if there is none. Local.
std::string unsound_tensors(const std::string& path);

/// Thrown for a checkpoint that a newer version of Tessera has written. It is not damaged.
class CheckpointVersionError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// Thrown for a checkpoint whose bytes, sizes or files differ from the written ones. An error of
/// the system while reading is an Error of another class: the checkpoint may then be sound.
class CheckpointDamagedError : public UsageError {
 public:
  using UsageError::UsageError;
};

/// A committed checkpoint, opened for reading. Needs no lock. All functions except `verify(group)`
/// are local. For one thread at a time.
class Checkpoint {
 public:
  /// Reads the manifest and checks its digest and version (CheckpointVersionError), and that every
  /// file exists and has its size. In all functions of this class a changed bit, a missing byte or
  /// a missing file is a CheckpointDamagedError that names the file, the tensor if the error is in
  /// one, and the older checkpoints.
  explicit Checkpoint(const std::string& path);
  /// The same if hosts need not share the folder: a file may be at `path` of any rank, and ranks
  /// may pass different paths. Files that are not on this rank's host are read over the group,
  /// within read_together(). An error on one rank is thrown on all: CheckpointDamagedError if the
  /// checkpoint is damaged on each rank that failed, otherwise AgreedError. A file that is on no
  /// rank's host counts as damage; the text names the rank and the host that wrote it. Collective.
  Checkpoint(const std::string& path, ProcessGroup group);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const;
  int64_t step() const;
  int world_size() const;  ///< Number of ranks that wrote it.
  /// The tensors with elements that are NaN or infinite, one a line; "" if all are finite.
  std::string unsound() const;
  std::vector<std::string> files() const;
  bool contains(const std::string& file) const;

  /// Runs `body` on every rank. Within it the local functions may read files of other hosts, which
  /// come over the group in windows of at most 16 MiB. Outside of `body` that is a UsageError.
  /// `body` must not call collectives; an error on one rank is thrown on all. Collective, for a
  /// checkpoint that was opened with a group.
  void read_together(const std::function<void()>& body) const;

  /// Reads every byte of the files on this host and compares every digest. Local.
  void verify() const;
  /// The same for all files, each divided among the ranks that have it. An error on one rank is
  /// thrown on all, as by the constructor. Collective.
  void verify(const ProcessGroup& group) const;

  /// A whole text file; its digest is compared.
  std::string text(const std::string& file) const;
  /// A safetensors file, for names, shapes and dtypes. The digest of its header is compared; data
  /// that is read through it is not.
  const SafetensorsFile& tensors(const std::string& file) const;
  /// A whole tensor; its digest is compared.
  at::Tensor load_tensor(const std::string& file, const std::string& name) const;
  /// As SafetensorsFile::load_slice. The digest is compared only if the range is the whole tensor:
  /// call `verify` before.
  void load_slice(const std::string& file, const std::string& name, int64_t begin, int64_t count,
                  at::Tensor out) const;

  /// Assembles the requested ranges from the saved slices of `set`, whatever ranges were saved, and
  /// reads only the overlapping parts. Every bit is as it was saved. Returns one slice for each
  /// request, in their order; parameters that were never stepped or not saved have no state.
  /// Tensors that follow the parameter are one-dimensional with `numel` elements in memory order;
  /// all others are returned unchanged. The memory order is that of the request's strides: a
  /// parameter that was saved in another order is read whole, and its elements are put into this
  /// one. If the request or the checkpoint states no strides, the order is the saved one. The
  /// returned strides are empty if the checkpoint states none.
  /// UsageError with the parameter's name if it was saved with another shape, if no rank saved an
  /// element of the range, or if saved slices contradict each other.
  std::vector<StateSlice> load_slices(const std::vector<ElementRange>& requests,
                                      const std::string& set = kOptimizerSlices) const;

  struct [[gnu::visibility("hidden")]] Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
#pragma GCC visibility pop
