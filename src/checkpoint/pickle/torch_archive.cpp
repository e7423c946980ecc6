#include "checkpoint/pickle/torch_archive.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <torch/version.h>

#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/file_kind.h"
#include "checkpoint/pickle/legacy_archive.h"
#include "checkpoint/pickle/pickle_reader.h"
#include "tessera/error.h"

namespace tessera::pickle {

using safetensors::in_quotes;

struct TorchArchive::Impl {
  std::string where;
  FileDescriptor file;
  uint64_t file_bytes = 0;
  std::string folder;  // "archive/"; of a file before PyTorch 1.6 ""
  std::unordered_map<std::string, ZipRecord> records;
  bool of_cpp = false;
  Values values;

  void open(const std::string& path);
  void open_zip(const ReadAt& read_at);
  void check_script() const;
  void read(void* to, size_t count, uint64_t offset) const;
  void find_folder(const std::vector<ZipRecord>& sorted);
  const ZipRecord& record(const std::string& name) const;
  std::string text_of(const std::string& name, size_t most) const;
  const ZipRecord& storage_of(const TorchTensor& tensor) const;
  at::Tensor read_runs(const TorchTensor& tensor, const std::vector<size_t>& order) const;
};

namespace {

constexpr size_t kMaxVersionBytes = 64;
// Shorter runs of a strided tensor are read together with the elements between them.
constexpr int64_t kShortestRunBytes = 256;

/// The dimensions that move in the storage, the one with the largest stride first.
std::vector<size_t> dimensions_by_stride(const TorchTensor& tensor) {
  std::vector<size_t> order;
  for (size_t i = 0; i < tensor.shape.size(); ++i)
    if (tensor.shape[i] > 1 && tensor.strides[i] > 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return tensor.strides[a] > tensor.strides[b]; });
  return order;
}

/// The rows [first, first + count) of a tensor that is not empty.
TorchTensor rows_of(const TorchTensor& tensor, int64_t first, int64_t count) {
  TorchTensor rows = tensor;
  rows.numel = tensor.numel / tensor.shape[0] * count;
  rows.shape[0] = count;
  rows.offset += first * tensor.strides[0];
  rows.extent -= (tensor.shape[0] - count) * tensor.strides[0];
  return rows;
}

}  // namespace

void TorchArchive::Impl::open(const std::string& path) {
  where = "torch file: " + path + ": ";
  file = open_regular(where, path, file_bytes);
  std::string begin(std::min<uint64_t>(file_bytes, kKindBytes), '\0');
  read(begin.data(), begin.size(), 0);
  const FileKind kind = file_kind(begin);
  if (kind == FileKind::foreign) throw UsageError(where + foreign_kind(begin));
  if (kind == FileKind::json) throw UsageError(where + "is JSON; expected a file of torch.save");
  if (kind == FileKind::safetensors && begin.size() > 8)
    throw UsageError(where + "is a safetensors file; expected a file of torch.save");
  const ReadAt read_at = [this](void* to, size_t count, uint64_t at) { read(to, count, at); };
  if (kind != FileKind::legacy) return open_zip(read_at);
  auto legacy = read_legacy_archive(where, file_bytes, read_at);
  for (const auto& record : legacy.records) records.emplace(record.name, record);
  values = std::move(legacy.values);
}

void TorchArchive::Impl::open_zip(const ReadAt& read_at) {
  const auto sorted = read_zip_directory(where, file_bytes, read_at);
  find_folder(sorted);
  for (const auto& record : sorted) records.emplace(record.name, record);
  if (records.count(folder + "byteorder") > 0) {
    const std::string order = text_of("byteorder", kMaxVersionBytes);
    if (order != "little")
      throw UsageError(where + "has byte order " + in_quotes(order) +
                       "; expected little: load it with PyTorch and save it on a little-endian "
                       "machine");
  }
  values = read_pickle(where, text_of("data.pkl", kMaxPickleBytes));
  of_cpp = records.count(folder + "constants.pkl") > 0;
  if (of_cpp) check_script();
}

/// C++'s torch::save() writes TorchScript, too, whose classes have no code.
void TorchArchive::Impl::check_script() const {
  const auto found = std::find_if(values.foreign.begin(), values.foreign.end(),
                                  [](const auto& name) { return name.starts_with("__torch__."); });
  if (found == values.foreign.end() && values.root.kind != Kind::foreign) return;
  throw UsageError(fmt::format(
      "{}is a TorchScript archive with the class {}, whose code Tessera does not run; expected a "
      "file of torch.save. If you trust the archive, Python converts it: "
      "torch.save(torch.jit.load(FILE).state_dict(), \"weights.pt\")",
      where, in_quotes(found == values.foreign.end() ? values.global_name(values.root) : *found)));
}

void TorchArchive::Impl::read(void* to, size_t count, uint64_t offset) const {
  const int64_t got = file.read_at(to, count, offset);
  if (got < 0)
    throw Error(fmt::format("{}reading {} bytes at offset {} failed: {}", where, count, offset,
                            errno_text(errno)));
  if (static_cast<size_t>(got) != count)
    throw UsageError(fmt::format("{}ends at offset {}; expected {} bytes at {}", where,
                                 offset + static_cast<uint64_t>(got), count, offset));
}

/// The records of torch.save are in one folder. The first record's name begins with the folder's.
void TorchArchive::Impl::find_folder(const std::vector<ZipRecord>& sorted) {
  const std::string first = sorted.empty() ? "" : sorted.front().name;
  folder = first.substr(0, first.find('/') + 1);
  bool there = false;
  for (const auto& record : sorted) {
    there = there || record.name == folder + "data.pkl";
    const bool version =
        record.name == folder + "version" || record.name == folder + ".data/version";
    if (version && record.bytes > kMaxVersionBytes)
      throw UsageError(where + "has a version of " + std::to_string(record.bytes) + " bytes");
  }
  if (!there || folder.empty())
    throw UsageError(where + "is a zip archive without a data.pkl; expected a file of torch.save" +
                     (first.ends_with(".npy") ? "; it looks like an .npz file of NumPy" : ""));
}

const ZipRecord& TorchArchive::Impl::record(const std::string& name) const {
  const auto found = records.find(folder + name);
  if (found == records.end())
    throw UsageError(where + "the archive has no record " + in_quotes(name));
  if (found->second.compressed)
    throw UsageError(where + "its record " + in_quotes(name) +
                     " is compressed; expected stored records, as torch.save writes them");
  return found->second;
}

/// Reads a small record.
std::string TorchArchive::Impl::text_of(const std::string& name, size_t most) const {
  const ZipRecord& from = record(name);
  if (from.bytes > most)
    throw UsageError(fmt::format("{}its record {} has {} bytes; expected at most {}", where,
                                 in_quotes(name), from.bytes, most));
  std::string text(static_cast<size_t>(from.bytes), '\0');
  read(text.data(), text.size(), from.offset);
  if (zip_crc(text) != from.crc)
    throw UsageError(
        fmt::format("{}its record {} has the checksum {:08x}; expected {:08x}: the "
                    "file is damaged",
                    where, in_quotes(name), zip_crc(text), from.crc));
  return text;
}

const ZipRecord& TorchArchive::Impl::storage_of(const TorchTensor& tensor) const {
  const ZipRecord& storage = record("data/" + tensor.storage);
  if (storage.bytes != tensor.storage_bytes)
    throw UsageError(fmt::format("{}tensor {}: its storage has {} bytes; expected {}", where,
                                 in_quotes(tensor.name), storage.bytes, tensor.storage_bytes));
  return storage;
}

/// Reads a tensor whose elements along order.back() lie side by side, and nothing between them.
at::Tensor TorchArchive::Impl::read_runs(const TorchTensor& tensor,
                                         const std::vector<size_t>& order) const {
  const uint64_t width = tensor.dtype.bytes, from = storage_of(tensor).offset;
  std::vector<int64_t> sizes, strides(tensor.shape.size(), 0);  // of the memory that is read
  for (const size_t i : order) sizes.push_back(tensor.shape[i]);
  int64_t numel = 1;
  for (size_t i = order.size(); i-- > 0; numel *= sizes[i]) strides[order[i]] = numel;
  const at::Tensor read_into =
      at::empty({numel}, at::TensorOptions().dtype(scalar_type_of(where, tensor)));
  auto* to = static_cast<char*>(read_into.data_ptr());
  const size_t outer = sizes.size() - 1;
  const uint64_t run = static_cast<uint64_t>(sizes[outer]) * width;
  std::vector<int64_t> index(outer, 0);
  int64_t element = tensor.offset;
  for (int64_t left = numel / sizes[outer]; left > 0; --left, to += run) {
    read(to, run, from + static_cast<uint64_t>(element) * width);
    for (size_t i = outer; i-- > 0;) {
      element += tensor.strides[order[i]];
      if (++index[i] < sizes[i]) break;
      element -= sizes[i] * tensor.strides[order[i]];
      index[i] = 0;
    }
  }
  return read_into.as_strided(tensor.shape, strides).clone(at::MemoryFormat::Contiguous);
}

TorchArchive::TorchArchive(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->open(path);
  if (!impl_->values.foreign.empty())
    spdlog::warn("tessera: {}leaves out {}", impl_->where, foreign_text(impl_->values));
}
TorchArchive::~TorchArchive() = default;

const std::string& TorchArchive::where() const { return impl_->where; }
bool TorchArchive::of_cpp() const { return impl_->of_cpp; }
const Values& TorchArchive::values() const { return impl_->values; }

void TorchArchive::check_storage(const TorchTensor& tensor) const { impl_->storage_of(tensor); }

at::Tensor TorchArchive::load(const TorchTensor& tensor) const {
  const auto options = at::TensorOptions().dtype(scalar_type_of(where(), tensor));
  const uint64_t width = tensor.dtype.bytes;
  const uint64_t from =
      impl_->storage_of(tensor).offset + static_cast<uint64_t>(tensor.offset) * width;
  if (tensor.numel == 0) return at::empty(tensor.shape, options);
  const bool contiguous = tensor.contiguous();
  const auto order = dimensions_by_stride(tensor);
  if (!contiguous && !order.empty() && tensor.strides[order.back()] == 1 &&
      tensor.shape[order.back()] * static_cast<int64_t>(width) >= kShortestRunBytes)
    return impl_->read_runs(tensor, order);
  at::Tensor read = at::empty({tensor.extent}, options);
  impl_->read(read.data_ptr(), static_cast<size_t>(tensor.extent) * width, from);
  if (contiguous) return read.view(tensor.shape);
  return read.as_strided(tensor.shape, tensor.strides).clone(at::MemoryFormat::Contiguous);
}

void TorchArchive::load_slice(const TorchTensor& tensor, int64_t begin, int64_t count,
                              at::Tensor& out) const {
  if (count == 0) return;
  if (!tensor.contiguous()) {
    const int64_t row = tensor.numel / tensor.shape[0];
    const int64_t first = begin / row, end = (begin + count + row - 1) / row;
    const auto rows = load(rows_of(tensor, first, end - first));
    out.view({-1}).copy_(rows.view({-1}).narrow(0, begin - first * row, count));
    return;
  }
  const uint64_t width = tensor.dtype.bytes;
  impl_->read(
      out.data_ptr(), static_cast<size_t>(count) * width,
      impl_->storage_of(tensor).offset + static_cast<uint64_t>(tensor.offset + begin) * width);
}

at::ScalarType scalar_type_of(const std::string& where, const TorchTensor& tensor) {
  if (tensor.dtype.entry == "C128") return at::kComplexDouble;
  if (tensor.dtype.entry == "C32") return at::kComplexHalf;
  if (const auto type = safetensors::scalar_type(tensor.dtype.entry)) return *type;
  throw UsageError(
      fmt::format("{}tensor {} has dtype torch.{}, which this libtorch ({}) cannot hold", where,
                  in_quotes(tensor.name), tensor.dtype.dtype, TORCH_VERSION));
}

}  // namespace tessera::pickle
