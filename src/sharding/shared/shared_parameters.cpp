#include "sharding/shared/shared_parameters.h"

#include <algorithm>
#include <iterator>
#include <tuple>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include "comm/base/local_work.h"
#include "deferred/contents.h"
#include "sharding/bucket.h"
#include "sharding/bucket_plan.h"
#include "sharding/detection/detection.h"
#include "tessera/error.h"
#include "tessera/memory/deferred_init.h"
#include "tessera/step/agreement.h"

namespace tessera::sharding {

SharedParameters::SharedParameters(ProcessGroup group, std::string prefix, std::string expected,
                                   bool from_rank0)
    : group_(std::move(group)),
      prefix_(std::move(prefix)),
      expected_(std::move(expected)),
      from_rank0_(from_rank0) {}

bool SharedParameters::first_of_host() const { return group_.local_rank() == 0; }

at::Tensor SharedParameters::allocate(int64_t numel, at::TensorOptions options) {
  if (group_.size() == 1 || numel == 0) return {};
  auto memory = group_.allocate_common(numel, options);
  if (memory.defined()) return memory;
  agree(group_, [this] {
    if (group_.local_size() == 1) return;
    throw UsageError(fmt::format(
        "{}: option share_parameters needs memory that the {} ranks of this host can share, and "
        "the group uses {} between them; expected backend shm or auto, or the option off",
        prefix_, group_.local_size(), group_.backend_name()));
  });
  return {};
}

void SharedParameters::place(const at::Tensor& memory, const std::vector<NamedTensor>& parameters,
                             const std::vector<size_t>& members,
                             const std::vector<int64_t>& offsets) {
  const at::NoGradGuard no_grad;
  const NoDetection no_detection;
  auto page = std::make_unique<Page>(this, places_.size(), memory.numel(), memory.options(), "");
  page->attach(memory);
  page->refuse_writes_afterwards(fmt::format(
      "{}: a parameter of option share_parameters is written after the object that shares it was "
      "destroyed, which would change it on every rank of this host; expected the object to live as "
      "long as the module is written to",
      prefix_));
  std::vector<Place> places;
  for (size_t m = 0; m < members.size(); ++m) {
    auto parameter = parameters[members[m]].tensor;
    places.push_back({offsets[m], parameter.numel(), parameters[members[m]].name});
    if (first_of_host()) {
      comm::run_local_work(group_, prefix_, [&] {
        const deferred::Contents contents(parameter);
        window(memory, offsets[m], parameter).copy_(parameter.detach());
      });
    }
    parameter.set_data(window(page->flat(), offsets[m], parameter));
  }
  publish(memory, first_to_last(parameters, members));
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.offset, a.numel) < std::tie(b.offset, b.numel);
  });
  places_.push_back(std::move(places));
  pages_.push_back(std::move(page));
  bytes_ += static_cast<int64_t>(memory.nbytes());
}

/// An all-gather in which rank 0 owns everything works as a broadcast that supports common memory.
void SharedParameters::publish(const at::Tensor& memory, const std::string& names) {
  if (!from_rank0_) return group_.barrier("parameters " + names);
  std::vector<int64_t> counts(group_.size(), 0);
  counts[0] = memory.numel();
  group_.all_gather(memory, counts, "parameters " + names);
}

void SharedParameters::place_whole(const std::vector<NamedTensor>& parameters,
                                   const std::vector<size_t>& members) {
  for (const auto& list : by_dtype_and_device(parameters, members)) {
    std::vector<int64_t> offsets;
    int64_t numel = 0;
    for (const auto i : list) {
      offsets.push_back(numel);
      numel += parameters[i].tensor.numel();
    }
    const auto memory = allocate(numel, parameters[list[0]].tensor.options().requires_grad(false));
    if (memory.defined()) {
      place(memory, parameters, list, offsets);
      continue;
    }
    for (const auto i : list)
      comm::run_local_work(group_, prefix_, [&] { materialize(parameters[i].tensor); });
  }
}

bool SharedParameters::holds(const at::Tensor& parameter) const {
  const auto* page = Page::of(parameter);
  return page && page->owner() == this;
}

void SharedParameters::take_out(at::Tensor parameter) {
  const at::NoGradGuard no_grad;
  const NoDetection no_detection;
  parameter.set_data(parameter.detach().clone());
}

int64_t SharedParameters::own_bytes() const {
  if (bytes_ == 0) return 0;
  const int ranks = group_.local_size();
  return bytes_ / ranks + (group_.local_rank() < bytes_ % ranks ? 1 : 0);
}

void SharedParameters::wait_for_readers() {
  if (any()) group_.barrier("before a write to shared parameters");
}

void SharedParameters::write(const std::function<void()>& write) {
  wait_for_readers();
  agree(group_, [&] {
    if (any() && !first_of_host()) return;
    const at::NoGradGuard no_grad;
    ++writing_;
    const auto done = c10::make_scope_exit([this] { --writing_; });
    write();
  });
}

void SharedParameters::need(c10::ArrayRef<PageUse> uses, std::string_view op) {
  // set_() gives a parameter memory of its own, on the rank that calls it.
  const bool replaces = op == "aten::set_";
  if (writing_ > 0 && !replaces) return;
  for (const auto& use : uses) {
    if (!use.written) continue;
    const auto& places = places_[use.page->index()];
    const auto after =
        std::upper_bound(places.begin(), places.end(), use.offset,
                         [](int64_t offset, const Place& place) { return offset < place.offset; });
    if (replaces)
      throw UsageError(fmt::format(
          "{}: {} (as in torch::load) replaces the memory of parameter {}, which all ranks of this "
          "host share (option share_parameters); expected tessera::load_state_dict(*net, path) "
          "inside {}",
          prefix_, op, std::prev(after)->name, expected_));
    throw UsageError(
        fmt::format("{}: {} writes to parameter {}, which all ranks of this host share (option "
                    "share_parameters), so that it would change on every rank; expected {}",
                    prefix_, op, std::prev(after)->name, expected_));
  }
}

}  // namespace tessera::sharding
