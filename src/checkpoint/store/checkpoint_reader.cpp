#include <fmt/format.h>

#include "checkpoint/store/checkpoint_impl.h"
#include "checkpoint/store/slice_file.h"
#include "tessera/config/option_reader.h"

namespace tessera {

Checkpoint::Checkpoint(const std::string& path) : impl_(std::make_unique<Impl>(path)) {}
Checkpoint::Checkpoint(const std::string& path, ProcessGroup group)
    : impl_(std::make_unique<Impl>(path, std::move(group))) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::path() const { return impl_->path; }
int64_t Checkpoint::step() const { return impl_->manifest.step; }
int Checkpoint::world_size() const { return impl_->manifest.world_size; }
bool Checkpoint::contains(const std::string& file) const { return impl_->records.count(file) > 0; }

std::string Checkpoint::unsound() const { return store::unsound_text(impl_->manifest.files); }

std::vector<std::string> Checkpoint::files() const {
  std::vector<std::string> names;
  for (const auto& file : impl_->manifest.files) names.push_back(file.name);
  return names;
}

void Checkpoint::read_together(const std::function<void()>& body) const {
  impl_->source->together(body);
}

void Checkpoint::verify() const { impl_->verify_share(0, 1); }

void Checkpoint::verify(const ProcessGroup& group) const {
  store::agree_undamaged(group, [&] { impl_->verify_share(group.rank(), group.size()); });
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

std::vector<StateSlice> Checkpoint::load_slices(const std::vector<ElementRange>& requests,
                                                const std::string& set) const {
  static const std::vector<store::SavedSlice> kNone;
  static const std::map<std::string, std::vector<store::SavedSlice>> kNoParameters;
  const auto of_set = impl_->slices.find(set);
  const auto& by_parameter = of_set == impl_->slices.end() ? kNoParameters : of_set->second;
  std::vector<StateSlice> loaded;
  for (const auto& request : requests) {
    const std::string where =
        fmt::format("checkpoint: {}: {}", path(), store::slices_text(set, request.parameter));
    named(where + ": ", [&] { store::check_range(request); });
    const auto found = by_parameter.find(request.parameter);
    loaded.push_back(store::assemble(where, request,
                                     found == by_parameter.end() ? kNone : found->second, *impl_));
  }
  return loaded;
}

}  // namespace tessera
