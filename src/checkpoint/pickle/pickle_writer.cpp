#include "checkpoint/pickle/pickle_writer.h"

#include <bit>
#include <limits>
#include <utility>

namespace tessera::pickle {

void PickleWriter::little_endian(uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> 8 * i & 0xff);
}

void PickleWriter::integer(int64_t value) {
  const bool small =
      value >= std::numeric_limits<int32_t>::min() && value <= std::numeric_limits<int32_t>::max();
  text_ += small ? std::string("J") : std::string("\x8a\x08");
  little_endian(static_cast<uint64_t>(value), small ? 4 : 8);
}

void PickleWriter::real(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  text_ += 'G';
  for (int i = 7; i >= 0; --i) text_ += static_cast<char>(bits >> 8 * i & 0xff);
}

void PickleWriter::text(std::string_view value) {
  text_ += 'X';
  little_endian(value.size(), 4);
  text_ += value;
}

void PickleWriter::global(std::string_view module, std::string_view name) {
  text_ += 'c';
  text_ += module;
  text_ += '\n';
  text_ += name;
  text_ += '\n';
}

void PickleWriter::begin_ordered_dict() {
  global("collections", "OrderedDict");
  text_ += ")R(";
}

void PickleWriter::tensor(const DtypeName& dtype, std::string_view key,
                          const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  std::vector<int64_t> strides(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = numel;
    numel *= shape[i] > 0 ? shape[i] : 1;
  }
  for (const int64_t size : shape) numel = size == 0 ? 0 : numel;
  const bool typed = !dtype.storage.empty();
  global("torch._utils", typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
  begin_tuple();
  begin_tuple();
  text("storage");
  if (typed) global("torch", dtype.storage);
  else global("torch.storage", kUntypedStorage);
  text(key);
  text("cpu");
  integer(typed ? numel : numel * dtype.bytes);
  end_tuple();
  text_ += 'Q';
  integer(0);
  for (const auto* numbers : {&shape, &std::as_const(strides)}) {
    begin_tuple();
    for (const int64_t number : *numbers) integer(number);
    end_tuple();
  }
  boolean(false);
  begin_ordered_dict();
  end_dict();
  if (!typed) global("torch", dtype.dtype);
  end_tuple();
  text_ += 'R';
}

}  // namespace tessera::pickle
