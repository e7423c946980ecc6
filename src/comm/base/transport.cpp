#include "comm/base/transport.h"

#include <cstring>
#include <numeric>

#include <fmt/format.h>

namespace tessera::comm {

const char* op_name(Op op) {
  switch (op) {
    case Op::all_reduce:
      return "all_reduce";
    case Op::reduce:
      return "reduce";
    case Op::broadcast:
      return "broadcast";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_to_all:
      return "all_to_all";
    case Op::barrier:
      return "barrier";
    case Op::bytes:
      return "exchange of bytes";
    case Op::allocate:
      return "allocate";
    case Op::number:
      return "exchange of a number";
    case Op::split:
      return "split";
    case Op::fail:
      return "fail";
  }
  return "unknown operation";
}

std::string describe(const OpHeader& header) {
  auto text = fmt::format("{} #{}", op_name(header.op), header.sequence);
  if (header.op != Op::barrier && header.op != Op::split && header.op != Op::number) {
    const auto dtype =
        header.op == Op::bytes ? "bytes" : c10::toString(static_cast<at::ScalarType>(header.dtype));
    text += fmt::format(" of {} {}", header.numel, dtype);
    if (header.on_device) text += " on the device";
  }
  if (header.root >= 0) text += fmt::format(" with root {}", header.root);
  return text;
}

std::vector<std::string> gather_texts(Transport& transport, int rank, const std::string& mine,
                                      const Counts& sizes) {
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const auto all = at::empty({total}, at::TensorOptions().dtype(at::kByte));
  const auto* data = reinterpret_cast<const char*>(data_of(all));
  if (!mine.empty()) std::memcpy(data_of(segment_of(all, sizes, rank)), mine.data(), mine.size());
  if (total > 0) transport.all_gather(all, sizes);
  std::vector<std::string> texts;
  for (const auto size : sizes) {
    texts.emplace_back(data, size);
    data += size;
  }
  return texts;
}

}  // namespace tessera::comm
