#pragma once

#include <cstdint>
#include <string_view>

// The dtypes of PyTorch by their names in pickles.

namespace tessera::pickle {

struct DtypeName {
  std::string_view storage;  // in module torch; empty: none, the storage is untyped
  std::string_view dtype;    // in module torch
  std::string_view entry;    // as SafetensorsEntry::dtype; C128 and C32 by analogy
  int bytes;
};

inline constexpr DtypeName kDtypes[] = {
    {"FloatStorage", "float32", "F32", 4},
    {"DoubleStorage", "float64", "F64", 8},
    {"HalfStorage", "float16", "F16", 2},
    {"BFloat16Storage", "bfloat16", "BF16", 2},
    {"LongStorage", "int64", "I64", 8},
    {"IntStorage", "int32", "I32", 4},
    {"ShortStorage", "int16", "I16", 2},
    {"CharStorage", "int8", "I8", 1},
    {"ByteStorage", "uint8", "U8", 1},
    {"BoolStorage", "bool", "BOOL", 1},
    {"ComplexFloatStorage", "complex64", "C64", 8},
    {"ComplexDoubleStorage", "complex128", "C128", 16},
    {"", "complex32", "C32", 4},
    {"", "uint16", "U16", 2},
    {"", "uint32", "U32", 4},
    {"", "uint64", "U64", 8},
    {"", "float8_e4m3fn", "F8_E4M3", 1},
    {"", "float8_e5m2", "F8_E5M2", 1},
};

inline constexpr std::string_view kUntypedStorage = "UntypedStorage";

}  // namespace tessera::pickle
