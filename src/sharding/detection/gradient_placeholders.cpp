#include "sharding/detection/gradient_placeholders.h"

#include <utility>

#include <fmt/format.h>

#include "sharding/detection/detection.h"
#include "tessera/error.h"

namespace tessera::sharding {

GradientPlaceholders::GradientPlaceholders(const std::vector<NamedTensor>& parameters,
                                           std::string prefix, std::string expected,
                                           std::function<void(size_t)> zero)
    : prefix_(std::move(prefix)), expected_(std::move(expected)), zero_(std::move(zero)) {
  for (const auto& parameter : parameters) entries_.push_back({parameter, nullptr, {}, false});
}

GradientPlaceholders::~GradientPlaceholders() { take_away(); }

void GradientPlaceholders::show(size_t i) {
  auto& entry = entries_[i];
  auto& parameter = entry.parameter.tensor;
  if (!entry.page || entry.tensor.scalar_type() != parameter.scalar_type()) {
    const NoDetection no_detection;
    const at::AutoDispatchBelowADInplaceOrView no_views;
    const auto options =
        at::TensorOptions().dtype(parameter.scalar_type()).device(parameter.device());
    entry.page = std::make_unique<Page>(this, i, 1, options,
                                        prefix_ + ": .grad of parameter " + entry.parameter.name);
    entry.tensor = entry.page->flat().as_strided(parameter.sizes(),
                                                 std::vector<int64_t>(parameter.dim(), 0), 0);
  }
  entry.page->detach();  // an access by address is libtorch's error
  parameter.mutable_grad() = entry.tensor;
  entry.shown = true;
}

/// Module::zero_grad() replaces `.grad` by an alias (detach), so the storages are compared.
/// Tensor::is_alias_of() of libtorch 2 would read the address, which a placeholder does not have.
bool GradientPlaceholders::is_in_place(const Entry& entry) {
  const auto& grad = entry.parameter.tensor.grad();
  return grad.defined() && grad.has_storage() &&
         grad.storage().unsafeGetStorageImpl() == entry.tensor.storage().unsafeGetStorageImpl();
}

bool GradientPlaceholders::take_removed(size_t i) {
  auto& entry = entries_[i];
  return entry.shown && !is_in_place(entry) && std::exchange(entry.shown, false);
}

std::string GradientPlaceholders::set_by_program(size_t i) const {
  const auto& entry = entries_[i];
  if (!entry.parameter.tensor.grad().defined() || (entry.shown && is_in_place(entry))) return "";
  return fmt::format(
      "{}: .grad of parameter {} of the module itself was set, but the gradient is that of this "
      "rank's shard; expected {}",
      prefix_, entry.parameter.name, expected_);
}

void GradientPlaceholders::take_away() {
  for (auto& entry : entries_) {
    if (entry.shown && is_in_place(entry)) entry.parameter.tensor.mutable_grad() = at::Tensor();
    entry.shown = false;
  }
}

void GradientPlaceholders::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  if (op == "aten::detach" || op == "aten::detach_" || op == "aten::requires_grad_") return;
  const auto i = uses[0].page->index();
  if (op == "aten::zero_") {
    const NoDetection no_detection;
    const at::AutoDispatchBelowADInplaceOrView no_views;
    uses[0].page->attach(at::zeros({1}, uses[0].page->flat().options()));  // the operator writes it
    return zero_(i);
  }
  throw UsageError(fmt::format(
      "{}: {} uses .grad of parameter {} of the module itself, but the gradient is that of this "
      "rank's shard; expected {}",
      prefix_, op, entries_[i].parameter.name, expected_));
}

}  // namespace tessera::sharding
