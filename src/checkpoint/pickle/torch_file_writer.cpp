#include <set>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/pickle_writer.h"
#include "checkpoint/pickle/torch_archive_writer.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/weights/torch_file.h"

namespace tessera {

using safetensors::in_quotes;

struct TorchFileWriter::Impl {
  struct Slot {
    SafetensorsSpec spec;
    bool written = false;
  };
  std::string where;
  std::vector<Slot> slots;
  std::unordered_map<std::string, size_t> index;
  std::unique_ptr<pickle::TorchArchiveWriter> archive;
};

namespace {

std::string described(at::ScalarType dtype, at::IntArrayRef shape) {
  return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(shape, ", "));
}

}  // namespace

TorchFileWriter::TorchFileWriter(const std::string& path, std::vector<SafetensorsSpec> tensors)
    : impl_(std::make_unique<Impl>()) {
  impl_->where = "torch file: " + path + ": ";
  pickle::PickleWriter pickle;
  pickle.begin_ordered_dict();
  for (auto& spec : tensors) {
    const std::string who = impl_->where + "tensor " + in_quotes(spec.name) + " ";
    if (!impl_->index.emplace(spec.name, impl_->slots.size()).second)
      throw UsageError(who + "is given twice");
    if (!safetensors::is_utf8(spec.name)) throw UsageError(who + "has a name that is not UTF-8");
    pickle.text(spec.name);
    pickle.tensor(pickle::dtype_name_of(who, spec.dtype), std::to_string(impl_->slots.size()),
                  spec.shape);
    impl_->slots.push_back({std::move(spec)});
  }
  pickle.end_dict();
  impl_->archive = std::make_unique<pickle::TorchArchiveWriter>(path, pickle.finish());
}

TorchFileWriter::~TorchFileWriter() = default;

void TorchFileWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto found = impl_->index.find(name);
  const std::string who = impl_->where + "tensor " + in_quotes(name) + " ";
  if (found == impl_->index.end()) throw UsageError(who + "was not declared");
  auto& slot = impl_->slots[found->second];
  if (slot.written) throw UsageError(who + "is written twice");
  if (!tensor.defined() || tensor.scalar_type() != slot.spec.dtype ||
      tensor.sizes() != at::IntArrayRef(slot.spec.shape))
    throw UsageError(who + "is declared as " + described(slot.spec.dtype, slot.spec.shape) +
                     ", given is " +
                     (tensor.defined() ? described(tensor.scalar_type(), tensor.sizes())
                                       : "an undefined tensor"));
  materialize(tensor);  // the system cannot read memory whose values are deferred
  impl_->archive->write(std::to_string(found->second), tensor);
  slot.written = true;
}

void TorchFileWriter::commit() {
  std::vector<std::string> missing;
  for (const auto& slot : impl_->slots)
    if (!slot.written) missing.push_back(in_quotes(slot.spec.name));
  if (!missing.empty()) {
    const size_t count = missing.size();
    missing.resize(std::min<size_t>(count, 5));
    throw UsageError(fmt::format("{}commit: {} tensors were not written: {}", impl_->where, count,
                                 fmt::join(missing, ", ")));
  }
  impl_->archive->commit();
}

void save_torch_file(const std::string& path,
                     const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::vector<SafetensorsSpec> specs;
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined())
      throw UsageError("torch file: " + path + ": tensor " + in_quotes(name) + " is undefined");
    specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  TorchFileWriter writer(path, std::move(specs));
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace tessera
