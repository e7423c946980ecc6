#include "checkpoint/pickle/torch_archive_writer.h"

#include <exception>

#include <caffe2/serialize/inline_container.h>

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/safetensors_dtype.h"
#include "tessera/detail/resolved.h"
#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::pickle {

struct TorchArchiveWriter::Impl {
  explicit Impl(const std::string& path)
      : file("torch file", path),
        writer([this](const void* from, size_t bytes) { return put(from, bytes); }) {}

  /// Called through C code and by the writer's destructor, which exceptions must not pass.
  size_t put(const void* from, size_t bytes) noexcept {
    if (failure || !file.open()) return bytes;
    try {
      file.write_at(from, bytes, position);
      position += bytes;
    } catch (...) {
      failure = std::current_exception();
    }
    return bytes;
  }

  void record(const std::string& name, const void* data, size_t bytes) {
    try {
      writer.writeRecord(name, data, bytes);
    } catch (const c10::Error& error) {
      throw Error("torch file: libtorch cannot write the record " + name + ": " +
                  compat::first_line(error.what()));
    }
    if (failure) std::rethrow_exception(failure);
  }

  AtomicFile file;
  uint64_t position = 0;
  std::exception_ptr failure;
  caffe2::serialize::PyTorchStreamWriter writer;
};

TorchArchiveWriter::TorchArchiveWriter(const std::string& path, const std::string& pickle)
    : impl_(std::make_unique<Impl>(path)) {
  impl_->record("data.pkl", pickle.data(), pickle.size());
  impl_->record("byteorder", "little", 6);
}

TorchArchiveWriter::~TorchArchiveWriter() = default;

void TorchArchiveWriter::write(std::string_view key, const at::Tensor& tensor) {
  const at::Tensor flat = detail::resolved(tensor.detach()).to(at::kCPU).contiguous();
  const void* data = flat.numel() > 0 ? flat.data_ptr() : static_cast<const void*>("");
  impl_->record("data/" + std::string(key), data, flat.numel() > 0 ? flat.nbytes() : 0);
}

void TorchArchiveWriter::commit() {
  impl_->writer.writeEndOfFile();
  if (impl_->failure) std::rethrow_exception(impl_->failure);
  impl_->file.commit();
}

DtypeName dtype_name_of(const std::string& where, at::ScalarType type) {
  for (const auto& name : kDtypes)
    if (safetensors::scalar_type(name.entry) == type ||
        (name.entry == "C128" && type == at::kComplexDouble) ||
        (name.entry == "C32" && type == at::kComplexHalf))
      return name;
  throw UsageError(where + "has dtype " + c10::toString(type) + ", which Tessera does not write");
}

}  // namespace tessera::pickle
