#include "fsdp/core.h"

namespace tessera::fsdp {

// [Note: full precision in evaluation] A parameter's dtype is that of the page it is a window of, so a flat has two pages, each with its slots: one of the dtype that
// mixed precision computes in, one of the shard's. Only one is in use; tensors that a graph keeps of the other find it released, and are refused.

void convert_buffers(ShardedModel& model, const std::optional<at::ScalarType>& dtype) {
  for (auto& [buffer, own] : model.buffers) {
    const auto wanted = dtype.value_or(own);
    if (buffer.scalar_type() != wanted) buffer.set_data(buffer.detach().to(wanted));
  }
}

void Core::set_full_precision(bool full) {
  if (full == full_precision_) return;
  full_precision_ = full;
  const c10::InferenceMode off(false);  // pages outlive the caller's
  at::NoGradGuard no_grad;
  residency->release_all();
  std::vector<size_t> changing;
  for (size_t f = 0; f < model.flats.size(); ++f) {
    if (model.flats[f].compute.dtype != model.flats[f].idle.dtype) changing.push_back(f);
  }
  for (const auto f : changing) std::swap(model.flats[f].compute, model.flats[f].idle);
  for (const auto f : changing) {
    if (!model.flats[f].compute.page) make_page(f);  // its slots have room for the largest flat of their dtype: all have theirs by now
    restore(model.flats[f]);
  }
  model.measure();
  convert_buffers(model, full ? std::nullopt : options.mixed_precision.buffer_dtype);
  watch();  // set_data to another dtype gave the parameters new accumulators
}

}  // namespace tessera::fsdp
