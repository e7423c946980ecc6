#include <fmt/format.h>

#include "checkpoint/io/safetensors_header.h"
#include "checkpoint/store/checkpoint_impl.h"
#include "tessera/error.h"
#include "tessera/step/agreement.h"

namespace tessera {

Checkpoint::Checkpoint(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::path() const { return impl_->path; }
int64_t Checkpoint::step() const { return impl_->manifest.step; }
int Checkpoint::world_size() const { return impl_->manifest.world_size; }
bool Checkpoint::contains(const std::string& file) const { return impl_->records.count(file) > 0; }

std::vector<std::string> Checkpoint::files() const {
  std::vector<std::string> names;
  for (const auto& file : impl_->manifest.files) names.push_back(file.name);
  return names;
}

void Checkpoint::verify() const { impl_->verify_share(0, 1); }

void Checkpoint::verify(const ProcessGroup& group) const {
  agree(group, [&] { impl_->verify_share(group.rank(), group.size()); });
}

std::string Checkpoint::text(const std::string& file) const { return impl_->text(file); }
const SafetensorsFile& Checkpoint::tensors(const std::string& file) const {
  return impl_->tensors(file);
}
at::Tensor Checkpoint::load_tensor(const std::string& file, const std::string& name) const {
  return impl_->load(file, name);
}

void Checkpoint::load_slice(const std::string& file, const std::string& name, int64_t begin,
                            int64_t count, at::Tensor out) const {
  impl_->load_slice(file, name, begin, count, std::move(out));
}

std::vector<StateSlice> Checkpoint::load_slices(const std::vector<ElementRange>& requests) const {
  static const std::vector<store::SavedSlice> kNone;
  std::vector<StateSlice> loaded;
  for (const auto& request : requests) {
    const std::string where = "checkpoint: " + path();
    try {
      store::check_run(request.shape, request.begin, request.numel);
    } catch (const UsageError& error) {
      throw UsageError(fmt::format("{}: optimizer state of {}: {}", where,
                                   safetensors::in_quotes(request.parameter), error.what()));
    }
    const auto found = impl_->slices.find(request.parameter);
    loaded.push_back(store::assemble(where, request,
                                     found == impl_->slices.end() ? kNone : found->second, *impl_));
  }
  return loaded;
}

}  // namespace tessera
