#include "ddp/background_updates.h"

#include <algorithm>
#include <utility>

#include "optim/fused_base.h"
#include "sharding/bucket.h"
#include "sharding/detection/detection.h"
#include "tessera/optim/fused_optimizer.h"
#include "tessera/optim/optimizer_state.h"

namespace tessera {
namespace {

/// Another tensor uses the memory, so its use could miss a late update.
bool shares_memory(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().use_count() > 1;
}

/// The work after the reduction of one bucket.
struct Late {
  std::vector<optim::Job> jobs;
  std::vector<sharding::Page*> pages;
};

}  // namespace

BackgroundUpdates::BackgroundUpdates(const std::vector<sharding::NamedTensor>& parameters,
                                     sharding::ArrivingPages& arriving)
    : arriving_(arriving) {
  for (const auto& [name, tensor] : parameters) {
    if (!FusedOptimizer::supports_range(tensor) || tensor.numel() == 0) continue;
    entries_[tensor.unsafeGetTensorImpl()];
    add(tensor);
  }
}

BackgroundUpdates::~BackgroundUpdates() {
  remove_all();
  arriving_.release();
}

BackgroundUpdates::Entry* BackgroundUpdates::find(const at::Tensor& parameter) {
  const auto found = entries_.find(parameter.unsafeGetTensorImpl());
  if (found == entries_.end()) return nullptr;
  if (!found->second.page) {
    if (shares_memory(parameter)) return nullptr;
    found->second.page = move_to_page(parameter);
  }
  // Skipped if the program has given the parameter other memory since.
  return sharding::Page::of(parameter) == found->second.page.get() ? &found->second : nullptr;
}

/// The tensor becomes a view of a page, with its memory.
std::unique_ptr<sharding::Page> BackgroundUpdates::move_to_page(at::Tensor tensor) {
  const sharding::NoDetection no_detection;
  auto page = arriving_.make_page(tensor.detach());
  tensor.set_data(sharding::window(page->flat(), 0, tensor));
  return page;
}

bool BackgroundUpdates::can_follow(const torch::optim::Optimizer& optimizer,
                                   const at::Tensor& parameter) {
  const auto& grad = parameter.grad();
  if (!grad.defined() || !find(parameter) || !FusedOptimizer::supports_range(parameter))
    return false;
  const auto* page = sharding::Page::of(grad);
  if (!page || page->owner() != &arriving_ || page->attached() || !grad.is_contiguous() ||
      grad.scalar_type() != parameter.scalar_type())
    return false;
  const auto state = get_state(optimizer, parameter).value_or(ParamState());
  return std::none_of(state.tensors.begin(), state.tensors.end(), [](const auto& named) {
    return !sharding::Page::of(named.second) && shares_memory(named.second);
  });
}

/// The pages of the parameter and of its state.
std::vector<sharding::Page*> BackgroundUpdates::pages_of(const torch::optim::Optimizer& optimizer,
                                                         const at::Tensor& parameter) {
  auto& entry = *find(parameter);
  std::vector<sharding::Page*> pages{entry.page.get()};
  // SGD without momentum has none.
  const auto state = get_state(optimizer, parameter).value_or(ParamState());
  for (const auto& [name, tensor] : state.tensors) {
    auto& page = entry.states[name];
    if (!page || sharding::Page::of(tensor) != page.get()) page = move_to_page(tensor);
    pages.push_back(page.get());
  }
  return pages;
}

void BackgroundUpdates::follow(FusedOptimizer& optimizer,
                               const std::vector<at::Tensor>& parameters) {
  std::map<const sharding::Page*, Late> late;  // by page of the gradients
  for (const auto& parameter : parameters) {
    const auto grad = parameter.grad();
    auto& [jobs, pages] = late[sharding::Page::of(grad)];
    jobs.push_back({optimizer.begin_update(parameter), grad});
    const auto own = pages_of(optimizer, parameter);
    pages.insert(pages.end(), own.begin(), own.end());
  }
  for (auto& [page, one] : late) {
    auto run = [jobs = std::move(one.jobs)] { optim::run_jobs(jobs); };
    if (!arriving_.follow(*page, one.pages, run)) run();
  }
}

}  // namespace tessera
