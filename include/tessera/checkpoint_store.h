#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/optim/state_slice.h"
#include "tessera/process_group.h"
#include "tessera/safetensors.h"

// Checkpoints of one run in one folder, one folder a step: `step-00000120/` with a manifest,
// weights and optimizer slices as safetensors, and texts. A folder of that name is complete: it is
// written beside under a hidden name, synced, and renamed. The format and the guarantees:
// docs/checkpoints.md. (Activation checkpointing is tessera/checkpoint.h.)

namespace tessera {

struct CheckpointStoreOptions {
  int keep_last = 2;  ///< The newest ones that stay, at least 1. The one just written always stays.
  int64_t keep_every = 0;  ///< Steps that are multiples of it stay for ever; 0: none.
  /// Bound of each wait for other ranks' disks in `commit`, where it is longer than the group's own
  /// time-out.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// The folder of one run, opened for writing. One writer at a time: rank 0 holds a lock on
/// `folder/.lock` until the last copy, and the last writer made from it, are gone; the kernel lets
/// go of it when the process ends, however it ends. A cheap handle. All ranks need to see the
/// folder, on one host or on a shared file system.
class CheckpointStore {
 public:
  /// Collective. Makes the folder where there is none, locks it, and removes what dead runs left
  /// half-written. Throws UsageError, on every rank, when another process has the lock (naming its
  /// pid and host), when an option is out of its range, or when a rank cannot see or write the
  /// folder.
  explicit CheckpointStore(const std::string& folder, ProcessGroup group = ProcessGroup(),
                           CheckpointStoreOptions options = {});
  ~CheckpointStore();
  CheckpointStore(const CheckpointStore&);
  CheckpointStore& operator=(const CheckpointStore&);

  const std::string& folder() const;              ///< Local.
  const CheckpointStoreOptions& options() const;  ///< Local.

  struct Impl;

 private:
  friend class CheckpointWriter;
  std::shared_ptr<Impl> impl_;
};

/// Writes one checkpoint. Every rank makes one, adds its own files (any number, none is fine) and
/// commits. What goes wrong while adding is remembered and thrown by `commit`, on every rank, so
/// that ranks may go on with their collectives; nothing more is written then. Destroyed without
/// `commit` (not a collective), the files are removed. One thread at a time.
class CheckpointWriter {
 public:
  /// Collective; the same step on all ranks, not negative. A checkpoint of that step that is there
  /// stays until `commit` replaces it.
  CheckpointWriter(const CheckpointStore& store, int64_t step);
  ~CheckpointWriter();
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  // Adding is local. Names are plain file names, each used once among all ranks, not beginning with
  // '.' or "manifest.".

  /// A safetensors file, at once. Tensors on any device, with any strides; written, as weights are,
  /// in row-major order.
  void add_tensors(const std::string& file,
                   const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                   const SafetensorsMetadata& metadata = {});
  /// The same, tensor by tensor: `write_tensor` for each of `specs`, in any order, before `commit`.
  /// Memory: one tensor.
  void begin_tensors(const std::string& file, std::vector<SafetensorsSpec> specs,
                     const SafetensorsMetadata& metadata = {});
  void write_tensor(const std::string& file, const std::string& name, const at::Tensor& tensor);
  /// A text file: JSON, YAML.
  void add_text(const std::string& file, const std::string& text);
  /// This rank's optimizer state, at most once: `optimizer-00001-of-00004.safetensors`. Parameters
  /// that never stepped may be left out altogether; of the others all runs must be there when all
  /// ranks have added theirs. No two slices of one rank may be of the same run.
  void add_slices(const std::vector<StateSlice>& slices);

  /// Collective. When it returns, the checkpoint is on disk and has its name, and older ones are
  /// pruned; returns its folder. Throws UsageError on every rank, naming rank, path and reason,
  /// when anything went wrong on any: then there is no trace of the checkpoint, unless the text
  /// says that it was committed, and older ones are untouched.
  std::string commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The committed checkpoint with the highest step in `folder`; none where there is none, or no such
/// folder. Local, takes no lock. Nothing is verified: that is Checkpoint's work.
std::optional<std::string> latest_checkpoint(const std::string& folder);

/// A committed checkpoint, opened for reading. Needs no lock. Local but for `verify(group)`; one
/// thread at a time.
class Checkpoint {
 public:
  /// Reads and checks the manifest: its digest, its version, presence and size of every file.
  /// Local. Here and below, a flipped bit, a missing byte or a missing file is a UsageError that
  /// names the file, and the tensor where it is in one, and says which older checkpoints there are.
  explicit Checkpoint(const std::string& path);
  ~Checkpoint();
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;

  const std::string& path() const;
  int64_t step() const;
  int world_size() const;  ///< Of the world that wrote it.
  std::vector<std::string> files() const;
  bool contains(const std::string& file) const;

  /// Reads every byte and compares every digest. Local.
  void verify() const;
  /// The same, each rank a share. Collective; what one rank finds is thrown by all.
  void verify(const ProcessGroup& group) const;

  /// A whole text, its digest compared.
  std::string text(const std::string& file) const;
  /// Names, shapes and dtypes of a safetensors file; its header's digest is compared, data read
  /// through it is not.
  const SafetensorsFile& tensors(const std::string& file) const;
  /// A whole tensor, its digest compared.
  at::Tensor load_tensor(const std::string& file, const std::string& name) const;
  /// As SafetensorsFile::load_slice. The digest is compared when the slice is the whole tensor: run
  /// `verify` before.
  void load_slice(const std::string& file, const std::string& name, int64_t begin, int64_t count,
                  at::Tensor out) const;

  /// Optimizer state for any cutting, put together bit by bit from the slices that were saved, of
  /// which only the parts asked for are read. One entry a request, in their order; parameters never
  /// stepped (or not saved) have no state in theirs. Tensors that follow the parameter are
  /// one-dimensional, `numel` elements in memory order; the others are as they were. UsageError
  /// naming the parameter: another shape, a run that no rank saved, saved slices that contradict
  /// each other.
  std::vector<StateSlice> load_slices(const std::vector<ElementRange>& requests) const;

  struct Impl;

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
