#include "tessera/weights/torch_file.h"

#include <unordered_map>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/torch_archive.h"
#include "tessera/detail/nearest.h"
#include "tessera/error.h"

namespace tessera {

using pickle::TorchTensor;
using safetensors::in_quotes;

struct TorchFile::Impl {
  Impl(const std::string& given, const std::string& key) : path(given), archive(given) {
    const auto find = archive.of_cpp() ? pickle::dict_at : pickle::weights_at;
    const auto dict = find(archive.where(), archive.values(), key);
    tensors = pickle::tensors_in(archive.where(), archive.values(), dict);
    for (const auto& tensor : tensors) {
      archive.check_storage(tensor);
      index.emplace(tensor.name, entries.size());
      entries.push_back({tensor.name, std::string(tensor.dtype.entry), tensor.shape, 0,
                         static_cast<uint64_t>(tensor.numel * tensor.dtype.bytes)});
    }
  }

  size_t place(const std::string& name) const {
    const auto found = index.find(name);
    if (found != index.end()) return found->second;
    std::vector<std::string> names;
    for (const auto& entry : entries) names.push_back(entry.name);
    throw UsageError(archive.where() + "no tensor " + in_quotes(name) + did_you_mean(name, names));
  }

  at::ScalarType type_of(size_t i) const {
    return pickle::scalar_type_of(archive.where(), tensors[i]);
  }

  std::string path;
  pickle::TorchArchive archive;
  std::vector<TorchTensor> tensors;
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string, size_t> index;
};

TorchFile::TorchFile(const std::string& path, const std::string& key)
    : impl_(std::make_unique<Impl>(path, key)) {}
TorchFile::~TorchFile() = default;
TorchFile::TorchFile(TorchFile&&) noexcept = default;
TorchFile& TorchFile::operator=(TorchFile&&) noexcept = default;

const std::string& TorchFile::path() const { return impl_->path; }
const std::vector<SafetensorsEntry>& TorchFile::entries() const { return impl_->entries; }
bool TorchFile::contains(const std::string& name) const { return impl_->index.count(name) > 0; }
const SafetensorsEntry& TorchFile::info(const std::string& name) const {
  return impl_->entries[impl_->place(name)];
}
at::ScalarType TorchFile::scalar_type(const std::string& name) const {
  return impl_->type_of(impl_->place(name));
}

at::Tensor TorchFile::load(const std::string& name) const {
  return impl_->archive.load(impl_->tensors[impl_->place(name)]);
}

void TorchFile::load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                           at::Tensor out) const {
  const size_t i = impl_->place(name);
  const int64_t numel = impl_->entries[i].numel();
  const std::string where = impl_->archive.where() + "tensor " + in_quotes(name) + ": ";
  check_slice(where, numel, impl_->type_of(i), elem_begin, elem_count, out);
  impl_->archive.load_slice(impl_->tensors[i], elem_begin, elem_count, out);
}

}  // namespace tessera
