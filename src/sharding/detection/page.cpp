#include "sharding/detection/page.h"

#include "tessera/detail/torch_compat.h"
#include "tessera/error.h"

namespace tessera::sharding {
namespace {

// For code that reads without an operator; an operator would provide the memory.
constexpr const char* kNoMemory =
    "the tensor has no memory now, and torch::save() and data_ptr() cannot wait for it; expected, "
    "before, wait() of the wrapper, or summon_full_params() or state_dict() of "
    "FullyShardedDataParallel";

}  // namespace

Page::Page(PageOwner* owner, size_t index, int64_t numel, at::TensorOptions options,
           std::string description)
    : link_(std::make_shared<Link>(Link{owner, this, std::move(description), {}, {}})),
      index_(index) {
  const auto dtype = c10::typeMetaToScalarType(options.dtype());
  const auto device = options.device();
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       numel * static_cast<int64_t>(c10::elementSize(dtype)),
                       at::DataPtr(nullptr, device), nullptr, false);
  const auto keys = at::empty({0}, options).unsafeGetTensorImpl()->key_set().add(kDetectionKey);
  flat_ = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, options.dtype());
  flat_.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  point_at(nullptr);
}

Page::~Page() {
  if (link_->description.empty()) link_->memory = memory_;
  else detach();
  link_->owner = nullptr;
  link_->page = nullptr;
}

void Page::release(void* link) { delete static_cast<std::shared_ptr<Link>*>(link); }

void Page::point_at(void* data) {
  auto* storage = flat_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(
      at::DataPtr(data, new std::shared_ptr<Link>(link_), &Page::release, flat_.device()));
  compat::refuse_data(storage, data || flat_.numel() == 0 ? "" : kNoMemory);
}

void Page::attach(at::Tensor memory) {
  memory_ = std::move(memory);
  point_at(memory_.data_ptr());
}

void Page::detach() {
  if (!memory_.defined()) return;
  point_at(nullptr);
  memory_ = at::Tensor();
}

/// A separate function, to keep Page::of() small: every operator on a page calls it.
[[gnu::cold, gnu::noinline]] void Page::refuse_orphan(const Link& link) {
  throw UsageError(
      link.description +
      " was used after the wrapper was destroyed, which freed the memory; expected the "
      "wrapper to live as long as its module, or state_dict() before");
}

void Page::check_orphan_write(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const auto& data = compat::unchecked_data_ptr(tensor.storage().unsafeGetStorageImpl());
  if (data.get_deleter() != &Page::release) return;
  const auto& link = **static_cast<std::shared_ptr<Link>*>(data.get_context());
  if (!link.page && !link.read_only.empty()) throw UsageError(link.read_only);
}

void Page::check_orphan_writes(const std::vector<NamedTensor>& parameters) {
  for (const auto& parameter : parameters) check_orphan_write(parameter.tensor);
}

Page* Page::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto& data = compat::unchecked_data_ptr(tensor.storage().unsafeGetStorageImpl());
  if (data.get_deleter() != &Page::release) return nullptr;
  const auto& link = **static_cast<std::shared_ptr<Link>*>(data.get_context());
  if (!link.page && !link.description.empty()) refuse_orphan(link);
  return link.page;
}

}  // namespace tessera::sharding
