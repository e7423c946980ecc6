// The first byte of the input chooses: 'z', the rest is a zip archive, or anything else, the rest
// is a pickle. Any input is refused with UsageError, or its records and tensors lie within the
// bounds that they state.

#include <cstdlib>
#include <cstring>
#include <string>

#include "checkpoint/pickle/pickle_reader.h"
#include "checkpoint/pickle/torch_values.h"
#include "checkpoint/pickle/zip_directory.h"
#include "tessera/error.h"

namespace pk = tessera::pickle;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_zip(const std::string& file) {
  const auto read = [&](void* to, size_t count, uint64_t offset) {
    require(offset <= file.size() && count <= file.size() - offset);
    std::memcpy(to, file.data() + offset, count);
  };
  uint64_t end = 0;
  for (const auto& record : pk::read_zip_directory("input: ", file.size(), read)) {
    require(record.offset >= end && record.offset <= file.size());
    if (record.compressed) continue;
    require(record.bytes <= file.size() - record.offset);
    end = record.offset + record.bytes;
  }
}

void check_pickle(const std::string& text) {
  const std::string where = "input: ";
  const pk::Values values = pk::read_pickle(where, text);
  for (const auto& tensor : pk::tensors_in(where, values, pk::weights_at(where, values, ""))) {
    const auto width = static_cast<uint64_t>(tensor.dtype.bytes);
    require(tensor.offset >= 0 && tensor.numel >= 0 && tensor.extent >= 0);
    require(tensor.numel == 0 ||
            static_cast<uint64_t>(tensor.offset + tensor.extent) * width <= tensor.storage_bytes);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (data[0] == 'z') check_zip(rest);
    else check_pickle(rest);
  } catch (const tessera::UsageError&) {
  }
  return 0;
}
