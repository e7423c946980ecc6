#include "checkpoint/store/tensor_file.h"

#include "checkpoint/io/atomic_file.h"
#include "checkpoint/io/digest.h"
#include "tessera/detail/resolved.h"
#include "tessera/step/nonfinite.h"

namespace tessera::store {

TensorFile::TensorFile(const std::string& folder, const std::string& name,
                       std::vector<SafetensorsSpec> specs, const SafetensorsMetadata& metadata)
    : writer_(folder + "/" + name, std::move(specs), metadata) {
  record_.name = name;
  record_.header_bytes = writer_.header().size();
  record_.bytes = record_.header_bytes;
  record_.digest = digest_of(writer_.header());
}

void TensorFile::write(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) return writer_.write(name, tensor);  // throws
  const at::Tensor plain = detail::resolved(tensor.detach()).to(at::kCPU).contiguous();
  const std::string digest =
      digest_of(plain.numel() > 0 ? plain.data_ptr() : nullptr, plain.nbytes());
  writer_.write(name, plain);
  record_.bytes += plain.nbytes();
  record_.tensors.emplace(name, digest);
  const std::string nonfinite = nonfinite_text(plain);
  if (!nonfinite.empty() && !is_mask(plain)) record_.nonfinite.push_back(name + ": " + nonfinite);
}

FileRecord TensorFile::finish() {
  writer_.commit();
  return record_;
}

FileRecord write_text_file(const std::string& folder, const std::string& name,
                           const std::string& text) {
  AtomicFile file("checkpoint", folder + "/" + name);
  file.write_at(text.data(), text.size(), 0);
  file.commit();
  FileRecord record;
  record.name = name;
  record.bytes = text.size();
  record.digest = digest_of(text);
  return record;
}

}  // namespace tessera::store
