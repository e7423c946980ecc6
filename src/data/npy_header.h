#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/data/npy_dataset.h"

namespace tessera {

struct NpyHeader {
  NpyArray::Type type = NpyArray::Type::f4;
  std::vector<int64_t> shape;
  int64_t data_begin = 0;  ///< bytes from the file's start
};

int64_t width_of(NpyArray::Type type);
const char* name_of(NpyArray::Type type);

/// The header of a .npy file that begins with `bytes` (the whole file may be passed; only its
/// header is looked at). Throws UsageError, `NpyDataset: path: reason`. Pure.
NpyHeader parse_npy_header(const std::string& path, std::string_view bytes);

}  // namespace tessera
