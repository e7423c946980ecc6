#pragma once

#include <string>
#include <vector>

#include "checkpoint/pickle/pickle_values.h"
#include "checkpoint/pickle/zip_directory.h"

namespace tessera::pickle {

struct LegacyArchive {
  Values values;
  std::vector<ZipRecord> records;  // "data/KEY": a storage, as in a zip archive
};

/// Reads a file of torch.save before PyTorch 1.6: pickles of a magic number, the form's number, a
/// description of the machine, the values, and the keys of the storages; then for each storage its
/// number of elements and the elements. PyTorch 0.1 wrote a tar archive of such streams: see
/// read_tar(). Throws UsageError, which begins with `where`, for files of a big-endian machine, and
/// for storages that leave the file or differ from the pickle. Does not use libtorch.
LegacyArchive read_legacy_archive(const std::string& where, uint64_t file_bytes,
                                  const ReadAt& read);

}  // namespace tessera::pickle
