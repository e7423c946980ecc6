#pragma once

#include <cstdint>
#include <string_view>

// The names of Python that are read in pickles, and the dtypes of PyTorch by their names.

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

inline bool is_dtype(std::string_view name) {
  for (const auto& dtype : kDtypes)
    if (dtype.dtype == name || (!dtype.storage.empty() && dtype.storage == name)) return true;
  return false;
}

inline bool is_allowed(std::string_view module, std::string_view name) {
  if (module == "collections") return name == "OrderedDict";
  if (module == "torch") return name == "Size" || is_dtype(name);
  if (module == "torch.storage") return name == kUntypedStorage;
  if (module == "torch._utils")
    return name == "_rebuild_tensor_v2" || name == "_rebuild_tensor_v3" ||
           name == "_rebuild_parameter" || name == "_rebuild_parameter_with_state";
  return false;
}

/// A class of C++'s torch::save(): "__torch__.Module" or "__torch__.___torch_mangle_0.Module".
inline bool is_cpp_module(std::string_view module, std::string_view name) {
  constexpr std::string_view kMangled = "__torch__.___torch_mangle_";
  return name == "Module" &&
         (module == "__torch__" ||
          (module.starts_with(kMangled) && module.find('.', kMangled.size()) == module.npos));
}

}  // namespace tessera::pickle
