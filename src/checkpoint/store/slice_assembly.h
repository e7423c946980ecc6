#pragma once

#include <string>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/optim/state_slice.h"

namespace tessera::store {

/// A saved slice and the file that contains it.
struct SavedSlice {
  const FileRecord* file;
  const SliceRecord* record;
};

/// Reads the data of slices. Errors name file and tensor.
class SliceReader {
 public:
  virtual ~SliceReader() = default;
  virtual at::Tensor load(const std::string& file, const std::string& name) const = 0;
  virtual void load_slice(const std::string& file, const std::string& name, int64_t begin,
                          int64_t count, at::Tensor out) const = 0;
  virtual at::ScalarType dtype(const std::string& file, const std::string& name) const = 0;
};

/// Assembles the state of one range. `saved`: all slices of that parameter. Throws UsageError as
/// Checkpoint::load_slices() does; the message begins with `where`.
StateSlice assemble(const std::string& where, const ElementRange& request,
                    const std::vector<SavedSlice>& saved, const SliceReader& reader);

}  // namespace tessera::store
