#include "checkpoint/io/declared_tensors.h"
#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/pickle/pickle_writer.h"
#include "checkpoint/pickle/torch_archive_writer.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/weights/torch_file.h"

namespace tessera {

struct TorchFileWriter::Impl {
  DeclaredTensors tensors;
  std::unique_ptr<pickle::TorchArchiveWriter> archive = nullptr;
};

TorchFileWriter::TorchFileWriter(const std::string& path, std::vector<SafetensorsSpec> tensors) {
  const std::string where = "torch file: " + path + ": ";
  impl_ = std::make_unique<Impl>(Impl{{where, std::move(tensors)}});
  pickle::PickleWriter pickle;
  pickle.begin_ordered_dict();
  size_t key = 0;
  for (const auto& spec : impl_->tensors.specs()) {
    const std::string who = where + "tensor " + safetensors::in_quotes(spec.name) + " ";
    if (!safetensors::is_utf8(spec.name)) throw UsageError(who + "has a name that is not UTF-8");
    pickle.text(spec.name);
    pickle.tensor(pickle::dtype_name_of(who, spec.dtype), std::to_string(key++), spec.shape);
  }
  pickle.end_dict();
  impl_->archive = std::make_unique<pickle::TorchArchiveWriter>(path, pickle.finish());
}

TorchFileWriter::~TorchFileWriter() = default;

void TorchFileWriter::write(const std::string& name, const at::Tensor& tensor) {
  const size_t number = impl_->tensors.check(name, tensor);
  materialize(tensor);  // the system cannot read memory whose values are deferred
  impl_->archive->write(std::to_string(number), tensor);
  impl_->tensors.mark_written(number);
}

void TorchFileWriter::commit() {
  impl_->tensors.check_complete();
  impl_->archive->commit();
}

void save_torch_file(const std::string& path,
                     const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  TorchFileWriter writer(path, specs_of("torch file: " + path + ": ", tensors));
  for (const auto& [name, tensor] : tensors) writer.write(name, tensor);
  writer.commit();
}

}  // namespace tessera
