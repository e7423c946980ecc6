#include "tessera/weights/torch_file.h"

#include <string_view>
#include <unordered_map>

#include <fmt/format.h>
#include <torch/script.h>

#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/script_trial.h"
#include "checkpoint/pickle/torch_archive.h"
#include "tessera/detail/nearest.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera {

using pickle::TorchTensor;
using safetensors::in_quotes;

namespace {

using NamedTensor = std::pair<std::string, at::Tensor>;

/// The parameters and the buffers of an archive of torch.jit.save.
std::vector<NamedTensor> named_tensors(const std::string& path) {
  const auto module = torch::jit::load(path, at::kCPU);
  std::vector<NamedTensor> named;
  for (const auto& item : module.named_parameters()) named.emplace_back(item.name, item.value);
  for (const auto& item : module.named_buffers()) named.emplace_back(item.name, item.value);
  return named;
}

/// The first line that has a text: errors in an archive's code begin with an empty one.
std::string reason_of(const std::exception& error) {
  const std::string_view text(error.what());
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == text.npos) return "libtorch gives no reason";
  return compat::first_line(error.what() + begin);
}

}  // namespace

struct TorchFile::Impl {
  Impl(const std::string& given, const std::string& key) : path(given), archive(given) {
    if (archive.is_script()) read_script(key);
    else read_tensors(key);
    for (size_t i = 0; i < entries.size(); ++i) index.emplace(entries[i].name, i);
  }

  void read_tensors(const std::string& key) {
    const auto dict = pickle::weights_at(archive.where(), archive.values(), key);
    tensors = pickle::tensors_in(archive.where(), archive.values(), dict);
    for (const auto& tensor : tensors) {
      archive.check_storage(tensor);
      entries.push_back({tensor.name, std::string(tensor.dtype.entry), tensor.shape, 0,
                         static_cast<uint64_t>(tensor.numel * tensor.dtype.bytes)});
    }
  }

  void read_script(const std::string& key) {
    if (!key.empty())
      throw UsageError(archive.where() +
                       "is an archive of torch.jit.save, which has no dicts; expected no key, "
                       "given is " +
                       in_quotes(key));
    const auto bytes = archive.script_bytes();
    pickle::try_in_child(
        archive.where(), [this] { named_tensors(path); },
        pickle::trial_limits(bytes.all, bytes.pickles));
    std::vector<NamedTensor> named;
    try {
      named = named_tensors(path);
    } catch (const std::exception& error) {
      throw UsageError(archive.where() + "torch::jit::load cannot read it: " + reason_of(error));
    }
    if (named.empty())
      throw UsageError(archive.where() +
                       "has no parameters and no buffers, as an archive that was frozen or "
                       "quantized; expected one that was saved before that");
    for (const auto& [name, tensor] : named) add(name, tensor);
  }

  void add(const std::string& name, const at::Tensor& tensor) {
    const at::Tensor value = tensor.detach().contiguous();
    entries.push_back({name, safetensors::dtype_name(path, name, value.scalar_type()),
                       value.sizes().vec(), 0, static_cast<uint64_t>(value.nbytes())});
    scripted.push_back(value);
  }

  size_t place(const std::string& name) const {
    const auto found = index.find(name);
    if (found != index.end()) return found->second;
    std::vector<std::string> names;
    for (const auto& entry : entries) names.push_back(entry.name);
    throw UsageError(archive.where() + "no tensor " + in_quotes(name) + did_you_mean(name, names));
  }

  at::ScalarType type_of(size_t i) const {
    return scripted.empty() ? pickle::scalar_type_of(archive.where(), tensors[i])
                            : scripted[i].scalar_type();
  }

  std::string path;
  pickle::TorchArchive archive;
  std::vector<TorchTensor> tensors;
  std::vector<at::Tensor> scripted;
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
  const size_t i = impl_->place(name);
  return impl_->scripted.empty() ? impl_->archive.load(impl_->tensors[i])
                                 : impl_->scripted[i].clone();
}

void TorchFile::load_slice(const std::string& name, int64_t elem_begin, int64_t elem_count,
                           at::Tensor out) const {
  const size_t i = impl_->place(name);
  const int64_t numel = impl_->entries[i].numel();
  const std::string where = impl_->archive.where() + "tensor " + in_quotes(name) + ": ";
  check_slice(where, numel, impl_->type_of(i), elem_begin, elem_count, out);
  if (impl_->scripted.empty())
    impl_->archive.load_slice(impl_->tensors[i], elem_begin, elem_count, out);
  else out.view({-1}).copy_(impl_->scripted[i].view({-1}).narrow(0, elem_begin, elem_count));
}

}  // namespace tessera
