#pragma once

#include <cstdint>
#include <string>

namespace tessera {

/// A .npy file as NumPy writes it, with any dictionary: the magic bytes, the version, the length of
/// the header, the header padded to 64 bytes, and the values.
inline std::string npy_of(std::string dictionary, const std::string& values, int version = 1) {
  const size_t begin = version == 1 ? 10 : 12;
  dictionary += std::string((64 - (begin + dictionary.size() + 1) % 64) % 64, ' ') + '\n';
  std::string bytes = std::string("\x93NUMPY") + static_cast<char>(version) + '\0';
  for (size_t i = 0; i < begin - 8; ++i)
    bytes += static_cast<char>(dictionary.size() >> (8 * i) & 0xff);
  return bytes + dictionary + values;
}

inline std::string npy(const std::string& type, const std::string& shape, const std::string& values,
                       int version = 1) {
  return npy_of("{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + shape + "), }",
                values, version);
}

}  // namespace tessera
