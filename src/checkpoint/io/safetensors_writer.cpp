#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/nearest.h"
#include "tessera/detail/resolved.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/safetensors.h"

namespace tessera {

using safetensors::in_quotes;

struct SafetensorsWriter::Impl {
  struct Slot {
    SafetensorsSpec spec;
    uint64_t begin = 0;
    uint64_t bytes = 0;
    bool written = false;
  };

  /// Places the tensors and formats the header.
  Impl(const std::string& target, std::vector<SafetensorsSpec> tensors,
       SafetensorsMetadata metadata);
  void open_file();
  Slot& slot(const std::string& name);

  std::string path;
  std::vector<Slot> slots;
  std::unordered_map<std::string, size_t> index;
  std::string header;
  std::unique_ptr<AtomicFile> file;
  bool committed = false;
};

namespace {

uint64_t byte_size(const std::string& path, const SafetensorsSpec& spec) {
  uint64_t bytes = c10::elementSize(spec.dtype);
  for (const int64_t size : spec.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
        bytes >> 62 != 0) {
      throw UsageError("safetensors: " + path + ": tensor " + in_quotes(spec.name) +
                       ": sizes must not be negative nor overflow");
    }
  }
  return bytes;
}

void check_names(const std::string& path, const std::vector<SafetensorsSpec>& tensors) {
  std::unordered_set<std::string> names;
  for (const SafetensorsSpec& spec : tensors) {
    if (spec.name == safetensors::kMetadataKey) {
      throw UsageError("safetensors: " + path + ": the tensor name " + in_quotes(spec.name) +
                       " is reserved by the format");
    }
    if (!names.insert(spec.name).second) {
      throw UsageError("safetensors: " + path + ": the tensor name " + in_quotes(spec.name) +
                       " is given twice");
    }
  }
}

std::string shape_text(const SafetensorsSpec& spec) {
  std::string text = std::string(c10::toString(spec.dtype)) + " [";
  for (size_t i = 0; i < spec.shape.size(); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(spec.shape[i]);
  return text + "]";
}

}  // namespace

SafetensorsWriter::Impl::Impl(const std::string& target, std::vector<SafetensorsSpec> tensors,
                              SafetensorsMetadata metadata)
    : path(target) {
  check_names(path, tensors);
  std::stable_sort(
      tensors.begin(), tensors.end(), [](const SafetensorsSpec& a, const SafetensorsSpec& b) {
        const size_t left = c10::elementSize(a.dtype), right = c10::elementSize(b.dtype);
        return left != right ? left > right : a.name < b.name;
      });
  safetensors::Header contents;
  contents.metadata = std::move(metadata);
  uint64_t offset = 0;
  for (SafetensorsSpec& spec : tensors) {
    const uint64_t bytes = byte_size(path, spec);
    contents.entries.push_back({spec.name, safetensors::dtype_name(path, spec.name, spec.dtype),
                                spec.shape, offset, offset + bytes});
    index.emplace(spec.name, slots.size());
    slots.push_back({std::move(spec), offset, bytes, false});
    offset += bytes;
  }
  header = safetensors::format_header(path, contents);
}

void SafetensorsWriter::Impl::open_file() {
  file = std::make_unique<AtomicFile>("safetensors", path);
  file->write_at(header.data(), header.size(), 0);
}

SafetensorsWriter::Impl::Slot& SafetensorsWriter::Impl::slot(const std::string& name) {
  const auto found = index.find(name);
  if (found == index.end()) {
    std::vector<std::string> names;
    for (const Slot& known : slots) names.push_back(known.spec.name);
    throw UsageError("safetensors: " + path + ": the tensor " + in_quotes(name) +
                     " was not declared" + did_you_mean(name, names));
  }
  return slots[found->second];
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsSpec> tensors,
                                     SafetensorsMetadata metadata)
    : impl_(std::make_unique<Impl>(path, std::move(tensors), std::move(metadata))) {
  impl_->open_file();
}

void SafetensorsWriter::check(const std::string& path, std::vector<SafetensorsSpec> tensors) {
  Impl(path, std::move(tensors), {});
}

SafetensorsWriter::~SafetensorsWriter() = default;

void SafetensorsWriter::write(const std::string& name, const at::Tensor& tensor) {
  Impl::Slot& slot = impl_->slot(name);
  const std::string where = "safetensors: " + impl_->path + ": tensor " + in_quotes(name);
  if (!impl_->file->open()) {
    throw UsageError(where + ": the writer " +
                     (impl_->committed ? "has committed" : "has failed before"));
  }
  if (slot.written) throw UsageError(where + " is written twice");
  if (!tensor.defined() || tensor.scalar_type() != slot.spec.dtype ||
      tensor.sizes() != at::IntArrayRef(slot.spec.shape)) {
    throw UsageError(where + " is declared as " + shape_text(slot.spec) + ", given is " +
                     (tensor.defined()
                          ? shape_text({name, tensor.scalar_type(), tensor.sizes().vec()})
                          : std::string("an undefined tensor")));
  }
  if (slot.bytes > 0) {
    materialize(tensor);  // the system cannot read memory whose values are deferred
    const at::Tensor flat = detail::resolved(tensor.detach()).to(at::kCPU).contiguous();
    impl_->file->write_at(flat.data_ptr(), slot.bytes, impl_->header.size() + slot.begin);
  }
  slot.written = true;
}

const std::string& SafetensorsWriter::header() const { return impl_->header; }

void SafetensorsWriter::commit() {
  if (!impl_->file->open()) {
    throw UsageError("safetensors: " + impl_->path + ": commit: the writer " +
                     (impl_->committed ? "has committed" : "has failed before"));
  }
  std::string missing;
  int count = 0;
  for (const Impl::Slot& slot : impl_->slots)
    if (!slot.written && ++count <= 5)
      missing += (count == 1 ? "" : ", ") + in_quotes(slot.spec.name);
  if (count > 0) {
    throw UsageError("safetensors: " + impl_->path + ": commit: " + std::to_string(count) +
                     " tensors were not written: " + missing + (count > 5 ? ", …" : ""));
  }
  impl_->file->commit();
  impl_->committed = true;
}

void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata) {
  std::vector<SafetensorsSpec> specs;
  specs.reserve(tensors.size());
  for (const auto& [name, tensor] : tensors) {
    if (!tensor.defined())
      throw UsageError("safetensors: " + path + ": tensor " + in_quotes(name) + " is undefined");
    specs.push_back({name, tensor.scalar_type(), tensor.sizes().vec()});
  }
  SafetensorsWriter writer(path, std::move(specs), metadata);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace tessera
