#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/npy_array.h"

namespace tessera {

struct NpyHeader {
  NpyArray::Type type = NpyArray::Type::f4;
  std::vector<int64_t> shape;
  int64_t data_begin = 0;  ///< In bytes from the start of the file.
};

/// Bytes of one value.
int64_t width_of(NpyArray::Type type);
/// "f4" and so on, "b1" for boolean.
const char* name_of(NpyArray::Type type);

/// Parses the header of the .npy file that starts with `bytes`. The whole file may be passed; only
/// its header is read. Throws UsageError "NpyDataset: path: reason". Pure.
NpyHeader parse_npy_header(const std::string& path, std::string_view bytes);

}  // namespace tessera
