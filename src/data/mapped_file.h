#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tessera {

struct MappedFile {
  std::shared_ptr<const uint8_t> data;  ///< Null for an empty file.
  int64_t size = 0;
};

/// Maps a regular file for reading. It stays mapped while `data` is alive. Throws UsageError
/// "component: path: reason".
///
/// Reading a page raises SIGBUS if the file was shortened and has lost the page, or if the disk
/// cannot read it. The first call installs a handler for SIGBUS: the page then reads as zeros, and
/// check_mapped() throws. A SIGBUS elsewhere is passed to the handler that was installed before.
MappedFile map_file(const std::string& component, const std::string& path);

/// Call it after each read of mapped data and before using the values. `data`: any byte that was
/// read, in a mapped file or elsewhere. Throws Error with component, path and sizes if a page of
/// that file was lost, now or earlier, or if the file is shorter now: the rest of its last page
/// then reads as zeros without a SIGBUS. Costs a system call for mapped data.
void check_mapped(const void* data);

/// As check_mapped(), for single values: notices lost pages only. Costs a load of a counter.
void check_mapped_pages(const void* data);

}  // namespace tessera
