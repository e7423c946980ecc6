#include "ddp/background_updates.h"

#include <algorithm>
#include <optional>
#include <typeinfo>
#include <utility>

#include <c10/util/ScopeExit.h>

#include "optim/fused_base.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {
namespace {

/// Derived classes may do more in step() than update.
FusedOptimizer* as_fused(torch::optim::Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  const bool known =
      type == typeid(FusedSGD) || type == typeid(FusedAdam) || type == typeid(FusedAdamW);
  return known ? static_cast<FusedOptimizer*>(&optimizer) : nullptr;
}

/// What follows the reduction of one bucket.
struct Late {
  std::vector<optim::Job> jobs;
  std::vector<sharding::Page*> pages;
};

}  // namespace

BackgroundUpdates::BackgroundUpdates(const std::vector<sharding::NamedTensor>& parameters,
                                     sharding::ArrivingPages& arriving)
    : arriving_(arriving) {
  const sharding::NoDetection no_detection;
  for (const auto& [name, tensor] : parameters) {
    if (!FusedOptimizer::supports_range(tensor) || tensor.numel() == 0) continue;
    auto page = arriving_.make_page(tensor.detach());
    auto parameter = tensor;
    parameter.set_data(sharding::window(page->flat(), 0, tensor));
    entries_[tensor.unsafeGetTensorImpl()].page = std::move(page);
  }
}

BackgroundUpdates::~BackgroundUpdates() { arriving_.release(); }

BackgroundUpdates::Entry* BackgroundUpdates::find(const at::Tensor& parameter) {
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end()) return nullptr;
  // Not if the program has given the parameter other memory since construction.
  return sharding::Page::of(parameter) == found->second.page.get() ? &found->second : nullptr;
}

bool BackgroundUpdates::is_late(const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  if (!grad.defined() || !find(parameter) || !FusedOptimizer::supports_range(parameter))
    return false;
  const auto* page = sharding::Page::of(grad);
  return page && page->owner() == &arriving_ && !page->attached() && grad.is_contiguous() &&
         grad.scalar_type() == parameter.scalar_type();
}

/// The pages of the parameter and of its state. State that is not on a page moves to one, with its
/// memory.
std::vector<sharding::Page*> BackgroundUpdates::pages_of(torch::optim::Optimizer& optimizer,
                                                         const at::Tensor& parameter) {
  auto& entry = *find(parameter);
  std::vector<sharding::Page*> pages{entry.page.get()};
  auto state = get_state(optimizer, parameter);
  if (!state) return pages;  // SGD without momentum
  bool moved = false;
  for (auto& [name, tensor] : state->tensors) {
    auto& page = entry.states[name];
    if (!page || sharding::Page::of(tensor) != page.get()) {
      const sharding::NoDetection no_detection;
      page = arriving_.make_page(tensor);
      tensor = sharding::window(page->flat(), 0, tensor);
      moved = true;
    }
    pages.push_back(page.get());
  }
  if (moved) set_state(optimizer, parameter, *state);
  return pages;
}

void BackgroundUpdates::step(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<at::Tensor, at::Tensor>> taken;  // parameter, gradient
  std::map<const sharding::Page*, Late> late;            // by page of the gradients
  const auto return_gradients = c10::make_scope_exit([&] {
    for (auto& [parameter, grad] : taken) parameter.mutable_grad() = grad;
  });
  if (auto* fused = as_fused(optimizer)) {
    for (const auto& group : fused->param_groups()) {
      for (const auto& parameter : group.params()) {
        if (!is_late(parameter)) continue;
        auto& [jobs, pages] = late[sharding::Page::of(parameter.grad())];
        jobs.push_back({fused->begin_update(parameter), parameter.grad()});
        const auto own = pages_of(optimizer, parameter);
        pages.insert(pages.end(), own.begin(), own.end());
        taken.emplace_back(parameter, std::exchange(parameter.mutable_grad(), {}));
      }
    }
  }
  for (auto& [page, one] : late) {
    auto run = [jobs = std::move(one.jobs)] { optim::run_jobs(jobs); };
    if (!arriving_.follow(*page, one.pages, run)) run();
  }
  optimizer.step();
}

}  // namespace tessera
