#include <cerrno>
#include <unordered_map>

#include <torch/version.h>

#include "checkpoint/io/file_descriptor.h"
#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"
#include "tessera/safetensors.h"

namespace tessera {

using safetensors::in_quotes;

struct SafetensorsFile::Impl {
  std::string path;
  FileDescriptor file;
  ReadBytes read_bytes;  // empty: from `file`
  uint64_t data_begin = 0;
  safetensors::Header header;
  std::unordered_map<std::string, size_t> index;

  void open();
  void read_header(uint64_t size);
  void read(void* to, size_t count, uint64_t offset) const;
  at::ScalarType type_of(const SafetensorsEntry& entry) const;
};

void SafetensorsFile::Impl::open() {
  uint64_t bytes = 0;
  file = open_regular("safetensors: " + path + ": ", path, bytes);
  read_header(bytes);
}

void SafetensorsFile::Impl::read_header(uint64_t size) {
  if (size < safetensors::kSizeBytes) {
    throw UsageError("safetensors: " + path + ": has " + std::to_string(size) +
                     " bytes, too few for the 8 bytes of the header size");
  }
  unsigned char prefix[safetensors::kSizeBytes];
  read(prefix, sizeof prefix, 0);
  std::string text(safetensors::header_size(path, prefix, size), '\0');
  read(text.data(), text.size(), sizeof prefix);
  data_begin = sizeof prefix + text.size();
  header = safetensors::parse_header(path, text, size - data_begin);
  for (size_t i = 0; i < header.entries.size(); ++i) index.emplace(header.entries[i].name, i);
}

void SafetensorsFile::Impl::read(void* to, size_t count, uint64_t offset) const {
  const int64_t got = read_bytes ? read_bytes(to, count, offset) : file.read_at(to, count, offset);
  if (got < 0) {
    throw Error("safetensors: " + path + ": reading " + std::to_string(count) +
                " bytes at offset " + std::to_string(offset) + " failed: " + errno_text(errno));
  }
  if (static_cast<size_t>(got) != count) {
    throw UsageError("safetensors: " + path + ": the file was cut short while open, at offset " +
                     std::to_string(offset + static_cast<uint64_t>(got)));
  }
}

at::ScalarType SafetensorsFile::Impl::type_of(const SafetensorsEntry& entry) const {
  const auto type = safetensors::scalar_type(entry.dtype);
  if (!type) {
    throw UsageError("safetensors: " + path + ": tensor " + in_quotes(entry.name) + " has dtype " +
                     entry.dtype + ", which this libtorch (" TORCH_VERSION ") cannot hold");
  }
  return *type;
}

SafetensorsFile::SafetensorsFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->open();
}
SafetensorsFile::SafetensorsFile(const std::string& path, uint64_t bytes, ReadBytes read)
    : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  impl_->read_bytes = std::move(read);
  impl_->read_header(bytes);
}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::string& SafetensorsFile::path() const { return impl_->path; }
const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const {
  return impl_->header.entries;
}
const SafetensorsMetadata& SafetensorsFile::metadata() const { return impl_->header.metadata; }
bool SafetensorsFile::contains(const std::string& name) const {
  return impl_->index.count(name) != 0;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(entries().size());
  for (const SafetensorsEntry& entry : entries()) names.push_back(entry.name);
  return names;
}

const SafetensorsEntry& SafetensorsFile::info(const std::string& name) const {
  const auto found = impl_->index.find(name);
  if (found == impl_->index.end()) {
    throw UsageError("safetensors: " + path() + ": no tensor " + in_quotes(name) +
                     did_you_mean(name, names()));
  }
  return entries()[found->second];
}

at::Tensor SafetensorsFile::load(const std::string& name) const {
  const SafetensorsEntry& entry = info(name);
  at::Tensor tensor = at::empty(entry.shape, at::TensorOptions().dtype(impl_->type_of(entry)));
  if (entry.end > entry.begin)
    impl_->read(tensor.data_ptr(), entry.end - entry.begin, impl_->data_begin + entry.begin);
  return tensor;
}

at::Tensor SafetensorsFile::load_bytes(const std::string& name) const {
  const SafetensorsEntry& entry = info(name);
  at::Tensor bytes = at::empty({static_cast<int64_t>(entry.end - entry.begin)}, at::kByte);
  if (bytes.numel() > 0)
    impl_->read(bytes.data_ptr(), bytes.nbytes(), impl_->data_begin + entry.begin);
  return bytes;
}

at::ScalarType SafetensorsFile::scalar_type(const std::string& name) const {
  return impl_->type_of(info(name));
}

void SafetensorsFile::load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                                 at::Tensor out) const {
  const SafetensorsEntry& entry = info(name);
  const at::ScalarType type = impl_->type_of(entry);
  const std::string where = "safetensors: " + path() + ": tensor " + in_quotes(name) + ": ";
  check_slice(where, entry.numel(), type, elem_begin, elem_count, out);
  if (elem_count > 0) {
    const uint64_t width = out.element_size();
    impl_->read(out.data_ptr(), static_cast<size_t>(elem_count) * width,
                impl_->data_begin + entry.begin + static_cast<uint64_t>(elem_begin) * width);
  }
}

}  // namespace tessera
