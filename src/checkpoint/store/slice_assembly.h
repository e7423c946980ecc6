#pragma once

#include <string>
#include <vector>

#include "checkpoint/store/manifest.h"
#include "tessera/optim/state_slice.h"

namespace tessera::store {

struct SavedSlice {
  const FileRecord* file;
  const SliceRecord* layout;
};

/// Where the data comes from; each throws naming file and tensor.
class SliceReader {
 public:
  virtual ~SliceReader() = default;
  virtual at::Tensor load(const std::string& file, const std::string& name) const = 0;
  virtual void load_slice(const std::string& file, const std::string& name, int64_t begin,
                          int64_t count, at::Tensor out) const = 0;
  virtual at::ScalarType dtype(const std::string& file, const std::string& name) const = 0;
};

/// The state of one run, from `saved`: all slices of that parameter. Throws UsageError as
/// Checkpoint::load_slices does; `where` begins the message.
StateSlice assemble(const std::string& where, const ElementRange& request,
                    const std::vector<SavedSlice>& saved, const SliceReader& reader);

}  // namespace tessera::store
