#include <algorithm>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/declared_tensors.h"
#include "checkpoint/io/safetensors_dtype.h"
#include "checkpoint/io/safetensors_header.h"
#include "tessera/detail/resolved.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/safetensors.h"

namespace tessera {

using safetensors::in_quotes;

struct SafetensorsWriter::Impl {
  /// Places the tensors and formats the header.
  Impl(const std::string& target, std::vector<SafetensorsSpec> tensors,
       SafetensorsMetadata metadata);
  void open_file();
  /// Throws UsageError, with `where`, after commit() or a failure.
  void check_open(const std::string& where) const;

  std::string path, where;
  DeclaredTensors tensors;
  std::vector<uint64_t> begins;  // by tensor: its first byte in the data; last: their number
  std::string header;
  std::unique_ptr<AtomicFile> file;
  bool committed = false;
};

namespace {

uint64_t byte_size(const std::string& where, const SafetensorsSpec& spec) {
  uint64_t bytes = c10::elementSize(spec.dtype);
  for (const int64_t size : spec.shape) {
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
        bytes >> 62 != 0) {
      throw UsageError(where + "tensor " + in_quotes(spec.name) +
                       ": sizes must not be negative nor overflow");
    }
  }
  return bytes;
}

std::vector<SafetensorsSpec> sorted(std::vector<SafetensorsSpec> tensors) {
  std::stable_sort(
      tensors.begin(), tensors.end(), [](const SafetensorsSpec& a, const SafetensorsSpec& b) {
        const size_t left = c10::elementSize(a.dtype), right = c10::elementSize(b.dtype);
        return left != right ? left > right : a.name < b.name;
      });
  return tensors;
}

}  // namespace

SafetensorsWriter::Impl::Impl(const std::string& target, std::vector<SafetensorsSpec> given,
                              SafetensorsMetadata metadata)
    : path(target),
      where("safetensors: " + path + ": "),
      tensors(where, sorted(std::move(given))),
      begins{0} {
  safetensors::Header contents;
  contents.metadata = std::move(metadata);
  for (const SafetensorsSpec& spec : tensors.specs()) {
    if (spec.name == safetensors::kMetadataKey)
      throw UsageError(where + "the tensor name " + in_quotes(spec.name) +
                       " is reserved by the format");
    const uint64_t begin = begins.back();
    begins.push_back(begin + byte_size(where, spec));
    contents.entries.push_back({spec.name, safetensors::dtype_name(path, spec.name, spec.dtype),
                                spec.shape, begin, begins.back()});
  }
  header = safetensors::format_header(path, contents);
}

void SafetensorsWriter::Impl::open_file() {
  file = std::make_unique<AtomicFile>("safetensors", path);
  file->write_at(header.data(), header.size(), 0);
}

void SafetensorsWriter::Impl::check_open(const std::string& who) const {
  if (!file->open())
    throw UsageError(who + ": the writer " + (committed ? "has committed" : "has failed before"));
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
  impl_->check_open(impl_->where + "tensor " + in_quotes(name));
  const size_t number = impl_->tensors.check(name, tensor);
  const uint64_t begin = impl_->begins[number], bytes = impl_->begins[number + 1] - begin;
  if (bytes > 0) {
    materialize(tensor);  // the system cannot read memory whose values are deferred
    const at::Tensor flat = detail::resolved(tensor.detach()).to(at::kCPU).contiguous();
    impl_->file->write_at(flat.data_ptr(), bytes, impl_->header.size() + begin);
  }
  impl_->tensors.mark_written(number);
}

const std::string& SafetensorsWriter::header() const { return impl_->header; }

void SafetensorsWriter::commit() {
  impl_->check_open(impl_->where + "commit");
  impl_->tensors.check_complete();
  impl_->file->commit();
  impl_->committed = true;
}

void save_safetensors(const std::string& path,
                      const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                      const SafetensorsMetadata& metadata) {
  SafetensorsWriter writer(path, specs_of("safetensors: " + path + ": ", tensors), metadata);
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace tessera
