#include <map>

#include "deferred/recorder.h"
#include "deferred/registry.h"

namespace tessera::deferred {
namespace {

/// Runs operators as they ran below autograd and autocast when they were recorded.
struct AsRecorded {
  Unrecorded unrecorded;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

/// The memory of the regions that an operation reads.
class Sources {
 public:
  Sources() = default;
  Sources(const Sources&) = delete;
  ~Sources() {
    for (auto* region : opened_) region->mapping.allow(Mapping::Access::none);
  }

  const Mapping& of(Region& region, size_t version) {
    auto& mapping = known_[&region];
    if (mapping) return *mapping;
    if (region.state == Region::State::present && region.version() == version) {
      region.mapping.allow(Mapping::Access::read);
      opened_.push_back(&region);
      return *(mapping = &region.mapping);
    }
    built_.push_back(build(region, version));
    return *(mapping = built_.back().get());
  }

 private:
  std::map<const Region*, const Mapping*> known_;
  std::vector<Region*> opened_;
  std::vector<std::unique_ptr<Mapping>> built_;
};

/// Runs `operation` on `target`, the memory of `region` before it.
void run_again(const Operation& operation, const Region& region, Mapping& target) {
  Sources sources;
  std::vector<at::Tensor> tensors;
  for (const auto& argument : operation.arguments)
    if (!argument.extent) tensors.push_back(argument.value);
    else if (argument.written) tensors.push_back(argument.extent->in(target));
    else tensors.push_back(argument.extent->in(sources.of(*argument.read, argument.version)));
  torch::jit::Stack stack;
  size_t next = 0;
  for (const auto& value : operation.stack)
    stack.push_back(replace_tensors(value, [&](const at::Tensor&) { return tensors[next++]; }));
  if (operation.generator) {
    auto generator = at::detail::createCPUGenerator();
    generator.set_state(operation.generator_state);
    stack[*operation.generator] = generator;
  }
  operation.op.callBoxed(&stack);
  for (const auto& result : operation.results)
    if (result.region.lock().get() == &region)
      result.extent.in(target).copy_(stack[result.index].toTensor());
  ++Registry::instance().stats.replayed;
}

}  // namespace

at::Tensor Extent::in(const Mapping& mapping) const {
  return at::for_blob(mapping.base() + offset * static_cast<int64_t>(c10::elementSize(dtype)),
                      sizes)
      .strides(strides)
      .options(at::TensorOptions(dtype))
      .make_tensor();
}

std::unique_ptr<Mapping> build(const Region& region, size_t version) {
  const AsRecorded as_recorded;
  auto mapping = std::make_unique<Mapping>(region.mapping.bytes());
  size_t first = version;
  while (first > 0 && !region.log[--first].overwrites) {
  }
  for (size_t i = first; i < version; ++i) {
    const auto& step = region.log[i];
    if (step.load) step.load(*mapping);
    else run_again(*step.operation, region, *mapping);
  }
  return mapping;
}

}  // namespace tessera::deferred
