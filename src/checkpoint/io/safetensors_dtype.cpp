#include "checkpoint/io/safetensors_dtype.h"

#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

struct Pair {
  std::string_view name;
  at::ScalarType type;
};

constexpr Pair kPairs[] = {
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I64", at::kLong},
    {"I32", at::kInt},
    {"I16", at::kShort},
    {"I8", at::kChar},
    {"U8", at::kByte},
    {"BOOL", at::kBool},
    {"C64", at::kComplexFloat},
    {kComplex128, at::kComplexDouble},
#if TESSERA_TORCH_HAS_SMALL_TYPES
    {"U16", at::kUInt16},
    {"U32", at::kUInt32},
    {"U64", at::kUInt64},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
#endif
};

}  // namespace

std::optional<at::ScalarType> scalar_type(std::string_view dtype) {
  for (const Pair& pair : kPairs)
    if (pair.name == dtype) return pair.type;
  return std::nullopt;
}

std::string dtype_name(const std::string& file, const std::string& tensor, at::ScalarType type) {
  for (const Pair& pair : kPairs)
    if (pair.type == type) return std::string(pair.name);
  throw UsageError("safetensors: " + file + ": tensor " + in_quotes(tensor) + " has dtype " +
                   c10::toString(type) + ", which the format cannot hold");
}

}  // namespace tessera::safetensors
